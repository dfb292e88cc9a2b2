"""Sessions that reach other machines: keys, connections, and what runs at their far end."""
