"""Code that runs on a GPU server: an ASGI application that serves a model, and a simulated GPU server."""
