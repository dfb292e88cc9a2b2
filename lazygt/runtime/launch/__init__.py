"""Worker processes: start, connection, supervision and end. One file per launcher."""
