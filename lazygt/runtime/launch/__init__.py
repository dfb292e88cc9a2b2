"""Worker processes: started, connected, watched, ended. A way to start them is one file."""
