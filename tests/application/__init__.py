"""Tests of the API for applications: declared tasks, publishing, handles."""
