"""What the server tells Prometheus."""
