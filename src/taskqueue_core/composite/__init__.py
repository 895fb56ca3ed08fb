"""Several queues or backends seen as one: what sharding and migration share."""
