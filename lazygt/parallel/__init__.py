"""Placement of values and modules on the mesh, and pipeline stages: the user's side."""
