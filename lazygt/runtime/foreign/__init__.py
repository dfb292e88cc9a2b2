"""Code that is not torch's own, as a worker gets and runs it."""
