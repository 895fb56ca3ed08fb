"""How a server is called: one request to its answer, with no decision on what becomes of the job."""
