"""Local programs: the graph of each rank, written node by node, and its exchanges of rows."""
