"""The socket protocol without I/O: frames, and a session for each side."""
