"""The WebSocket of workers, from the handshake to the release of their deliveries."""
