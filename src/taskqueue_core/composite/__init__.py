"""The code that sharding and migration share: it presents several queues or backends as one backend."""
