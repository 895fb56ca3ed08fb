"""The GPU side: a component that makes an ASGI application of a model, and a simulated server on it."""
