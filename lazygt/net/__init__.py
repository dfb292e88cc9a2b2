"""Messages between processes: channels, mailboxes, sockets and TCP connections."""
