"""State that all requests of one server share."""
