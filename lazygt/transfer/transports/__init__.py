"""How weights move between processes: one file a transport, see `base`."""
