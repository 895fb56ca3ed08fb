"""The socket protocol without I/O: the frames, and a session for each side."""
