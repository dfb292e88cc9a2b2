"""Checkpoints: what a program registers, saved while it runs, resumed when it was killed."""
