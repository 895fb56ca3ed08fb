"""Who may use the server: tokens, sessions, names, origins, TLS."""
