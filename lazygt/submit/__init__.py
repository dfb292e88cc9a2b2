"""From a recorded trace to runs on the workers: plans, submission, rollback, and their records."""
