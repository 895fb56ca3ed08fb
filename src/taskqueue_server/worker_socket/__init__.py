"""The workers' socket, from the handshake to the release of held deliveries."""
