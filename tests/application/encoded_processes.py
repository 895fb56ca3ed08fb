"""A registry with a codec whose tasks run in child processes, which import this module."""

from __future__ import annotations

import os

from taskqueue_core import CodecChain, Context, Fernet, Tasks, Zlib

KEY = "cw_0x689RpI-jtRR7oE8h_eQsKImvJapLeSbXpwF4e4="
tasks = Tasks(prefix="encoded.", codec=CodecChain(Zlib(above=0), Fernet(keys={"test": KEY})))


@tasks.task(run="process")
def pay(context: Context, card: str) -> tuple[str, bool]:
    """Stream and return the argument, and whether this is another process than that of the test."""
    context.stream(card)
    return card, os.getpid() != int(os.environ["TEST_PROCESS"])


@tasks.task(run="process", retry=1)
def fail(card: str) -> None:
    """Raise an exception whose text contains the argument."""
    raise LookupError(f"{card} is unknown")
