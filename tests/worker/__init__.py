"""Tests of workers: handlers, outcomes, and the client side of the websocket."""
