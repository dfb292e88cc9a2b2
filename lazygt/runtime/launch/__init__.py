"""Ways to start worker processes: one file each, all with the interface of `base`."""
