"""A killed worker is a longer wait: what was sent is kept until copies of its results are."""
