"""Helpers for authors of backends."""
