"""What is done around a subscription for the workers behind it: by the server for each socket, or by a local worker."""
