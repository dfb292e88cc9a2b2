"""Bucketing of the ranks' collectives, and their overlap with computation."""
