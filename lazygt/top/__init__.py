"""``lazygt top``: what the workers of a session are doing."""
