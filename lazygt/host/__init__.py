"""This host: private files and folders, processes, GPUs, timers, and the garbage collector."""
