"""Adapters of other libraries to lazygt."""
