"""Transports of weights between processes: one file each, see `base`."""
