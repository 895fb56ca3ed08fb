"""Tests of the capability ``slots``, and an independent model of a slot pool."""
