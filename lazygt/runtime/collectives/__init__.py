"""Collectives of the ranks: their group, its backends, and the ops as nodes of a plan."""
