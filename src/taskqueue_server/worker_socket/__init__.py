"""The workers' socket, from the first byte to the hand-back of what is held."""
