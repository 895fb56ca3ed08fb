"""Callbacks: HTTP requests that report to a client how its job ended. They are stored as tasks in their own queue."""
