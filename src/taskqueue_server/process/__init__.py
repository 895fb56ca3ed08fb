"""Server processes, listening sockets, signals and reload."""
