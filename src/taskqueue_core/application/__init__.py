"""The objects that a worker passes to an application's handlers."""
