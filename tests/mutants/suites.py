"""Which files are mutated, and which quick tests have to notice."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from taskqueue_core.conformance.slots import SlotsSuite

__all__ = ["QUICK", "SUITES", "Suite"]


class Suite(NamedTuple):
    """Files and their tests, the quickest first."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    """arguments of pytest"""
    seconds: float
    """that they may take; who takes longer hangs, and is found out by that"""

    def paths(self, root: Path) -> list[str]:
        """Return the files, whose names may be patterns."""
        found = [path for pattern in self.files for path in sorted(root.glob(pattern))]
        return [str(path.relative_to(root)) for path in found if path.name != "__init__.py"]


_KIT = "tests/redis/test_conformance.py"
_SCRIPTS = (
    f"--deselect={_KIT}::TestServer::test_machine",
    "tests/model/test_conformance.py::test_every_call_of_any_workload",
    "tests/redis/test_housekeeping.py",
    "tests/redis/test_journal.py",
    "tests/redis/test_resets.py",
    "tests/redis/test_answers_lost.py",
    "tests/redis/test_handing_back.py",
    f"{_KIT}::TestServer",
    "tests/redis/test_flow.py",
    "tests/redis/test_atomicity.py",
    "tests/redis/test_every_step.py",
    "tests/redis/test_books.py",
    "tests/redis/test_wakeups.py",
    "tests/redis/test_leases.py",
)
_WRAPPERS = ("publisher", "settlements", "intake", "control", "books", "receipts", "reading")

SUITES = {
    "protocol": Suite(
        ("src/taskqueue_core/protocol/*.py",),
        (
            "tests/server/test_session.py", "tests/server/test_session_frames.py",
            "tests/worker/test_client_session.py", "tests/worker/test_session_edges.py",
            "tests/worker/test_client_books.py", "tests/server/test_parts.py", "tests/worker/test_parts.py",
            "tests/worker/test_batches.py", "tests/server/test_protocol_docs.py", "tests/server/test_session_fuzz.py",
            "tests/server/test_socket.py", "tests/worker/test_executing.py", "tests/worker/test_reconnecting.py",
        ),
        120,
    ),
    "memory": Suite(
        ("src/taskqueue_memory/*.py",),
        (
            "tests/memory/test_edges.py", "tests/memory/test_tenant_edges.py", "tests/memory/test_clearing.py",
            "tests/memory/test_journal.py", "tests/memory/test_conformance.py", "tests/memory/test_wakeups.py",
            "tests/memory/test_limits.py", "tests/memory/test_order.py", "tests/memory",
        ),
        180,
    ),
    "redis": Suite(
        tuple(f"src/taskqueue_redis/{name}.py" for name in _WRAPPERS),
        (
            "tests/redis/test_partitions.py", *_SCRIPTS, "tests/redis/test_two_servers.py",
        ),
        150,
    ),
    "lua": Suite(
        tuple(
            f"src/taskqueue_redis/lua/{names}.lua"
            for names in ("[!s]*", "s[!l]*", "lib/[!s]*", "lib/s[!l]*")
        ),
        _SCRIPTS, 150,
    ),
    "slots": Suite(
        (
            "src/taskqueue_redis/slots.py", "src/taskqueue_redis/slot_books.py",
            "src/taskqueue_redis/lua/slots_*.lua", "src/taskqueue_redis/lua/lib/slots.lua",
        ),
        (
            "tests/redis/test_slots.py", "tests/redis/test_slots_faults.py",
            *(f"{_KIT}::TestServer::{name}" for name in dir(SlotsSuite) if name.startswith("test_")),
        ),
        150,
    ),
}  # fmt: skip

_SERVER, _CLIENT = "server_session.py", "client_session.py"
QUICK = {
    (f"src/taskqueue_core/protocol/{_SERVER}", "tests/server/test_session.py"): (
        "boolean: if known: -> if not known:",
        "comparison: self._state is not SessionState.READY -> self._state is SessionState.READY",
        "arithmetic: events += self._progress(frame) -> events -= self._progress(frame)",
        "return: return [Granted(n)] -> return None",
        "statement: self._credit = hello.credit -> pass",
    ),
    (f"src/taskqueue_core/protocol/{_SERVER}", "tests/server/test_session_frames.py"): (
        "boolean: if error.fatal: -> if not error.fatal:",
    ),
    (f"src/taskqueue_core/protocol/{_CLIENT}", "tests/worker/test_client_session.py"): (
        "boolean: if self._leaving: -> if not self._leaving:",
        "boolean: not 0 < frame.lease < float('inf') -> 0 < frame.lease < float('inf')",
        "comparison: receipt in self._held -> receipt not in self._held #1",
        (
            "comparison: self._state in (SessionState.READY, SessionState.DRAINING) -> "
            "self._state not in (SessionState.READY, SessionState.DRAINING)"
        ),
        "return: return self._granted -> return None",
        "statement: self._demand(SessionState.READY, SessionState.DRAINING) -> pass #1",
    ),
}
"""a few by file and test, which every test run tries"""
