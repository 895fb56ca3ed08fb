"""The HTTP client for GPU servers. It sends requests and interprets the answers, but decides nothing about the jobs."""
