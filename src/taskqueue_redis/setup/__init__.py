"""What Redis must be and allow."""
