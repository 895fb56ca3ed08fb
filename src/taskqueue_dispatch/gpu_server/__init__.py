"""The GPU side: an ASGI application that serves a model, and a simulated GPU server."""
