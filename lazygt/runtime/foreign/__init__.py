"""Code that torch alone does not have, as a worker gets and runs it."""
