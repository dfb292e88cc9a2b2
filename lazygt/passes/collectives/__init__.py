"""Collectives of the ranks' programs: which travel together, and what is computed meanwhile."""
