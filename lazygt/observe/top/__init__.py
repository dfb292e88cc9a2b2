"""``lazygt top``: a live view of a session's workers."""
