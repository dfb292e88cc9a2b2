"""Client's side of a session: requests to the workers, and their answers."""
