"""The command ``lazygt``."""
