"""Checks of the Redis server: version, configuration and permissions."""
