"""The socket protocol without sockets: frames, and a session for each side."""
