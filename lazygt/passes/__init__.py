"""Graph -> graph, pure. The order of passes stands in ``PIPELINE``."""
