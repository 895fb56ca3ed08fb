"""The HTTP client for GPU servers. It sends one request and reads its answer, and decides nothing about the job."""
