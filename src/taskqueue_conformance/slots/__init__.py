"""The tests of slots."""
