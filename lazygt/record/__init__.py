"""How torch reaches the graph: device, tensors, traces."""
