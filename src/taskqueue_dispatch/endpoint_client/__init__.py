"""The HTTP client for GPU servers: one request and its answer, without any decision about the job."""
