"""What all requests of one server share."""
