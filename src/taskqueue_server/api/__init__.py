"""The HTTP API: one table of operations, from which routes and their description are made."""
