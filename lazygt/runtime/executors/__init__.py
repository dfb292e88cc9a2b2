"""How a worker runs a plan; one file an executor."""
