"""The code that all entries of the workflow comparison share. It imports only the standard library.

An entry is a program that is started with a role, the address of the broker, the address of the Redis that keeps the
effects, and the arguments of the role: see `benchmarks/flows_side_by_side.py`. Each handler leaves one effect.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from adapter import PlainRedis

BROKER, EFFECTS = (sys.argv[2], sys.argv[3]) if len(sys.argv) > 3 else ("", "")
_local = threading.local()


def effect(kind: str, name: object, pause: float = 0.0) -> None:
    """Note that a handler has run: its kind, its name and the time."""
    if pause:
        time.sleep(pause)
    if not hasattr(_local, "redis"):
        _local.redis = PlainRedis(EFFECTS)
    _local.redis("RPUSH", "effects", f"{kind} {name} {time.time()}")


def main(**roles: Callable[..., object]) -> None:
    """Play the role of the command line, with its arguments."""
    roles[sys.argv[1]](*map(float, sys.argv[4:]))
