"""Authentication and authorization: tokens, sessions, origins, TLS, quotas."""
