"""Recording of torch's ops as a graph: device, tensors, traces."""
