"""Executors: ways for a worker to run a plan; one file each."""
