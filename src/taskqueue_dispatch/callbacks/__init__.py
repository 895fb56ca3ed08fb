"""Callbacks: signed requests that tell a client how its job ended. They are stored as tasks in a queue of their own."""
