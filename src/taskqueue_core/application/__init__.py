"""What applications and workers share."""
