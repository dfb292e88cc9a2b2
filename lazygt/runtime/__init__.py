"""Plans, workers, executors, channels and launchers. Never imports a pass."""
