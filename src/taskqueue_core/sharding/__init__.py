"""Sharding: one queue is spread over several partitions of a store."""
