"""The project's own checks and generators; each is a script and an importable module."""
