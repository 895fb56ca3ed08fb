"""Waiting for a state, for as long as a busy machine may need: the end of the wait only ends a hang."""

from __future__ import annotations

from functools import partial

from tests.redis import backends
from tests.server import support

PATIENCE = 30.0
"""seconds"""
until = partial(backends.until, within=PATIENCE)
eventually = partial(support.eventually, seconds=PATIENCE)
