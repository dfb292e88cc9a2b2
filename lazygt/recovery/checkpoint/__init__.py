"""Checkpoints of registered objects, saved while a program runs, and resumed."""
