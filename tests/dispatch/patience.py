"""Waiting for a condition with a timeout that is generous even on a busy machine; it only ends tests that hang."""

from __future__ import annotations

from functools import partial

from tests.redis import backends
from tests.server import support

PATIENCE = 30.0
"""timeout in seconds"""
until = partial(backends.until, within=PATIENCE)
eventually = partial(support.eventually, seconds=PATIENCE)
