"""A private Valkey or Redis server, run by this process."""
