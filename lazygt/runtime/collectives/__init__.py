"""What ranks exchange: their group, its backends, and the collectives as nodes of a plan."""
