"""The worker and its side of the socket."""
