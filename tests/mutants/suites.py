"""The suites: which source files are mutated, and the folders of the tests that may notice."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.mutants.changes import Mutant

EVERY_TEST = ("-m", "not chaos and not soak")
"""pytest arguments that include tests marked long, because such a test also counts"""


class Suite(NamedTuple):
    """An area: patterns of the source files to mutate, and folders of tests."""

    files: tuple[str, ...]
    tests: tuple[str, ...]

    def paths(self, root: Path) -> list[str]:
        """Return the files that match; a pattern with ``!`` excludes files.

        Raises `LookupError` if a pattern has no match.
        """
        found: set[Path] = set()
        for pattern in self.files:
            matches = set(root.glob(pattern.removeprefix("!")))
            if not matches:
                raise LookupError(f"no file matches {pattern}; correct the patterns of the suite")
            found = found - matches if pattern.startswith("!") else found | matches
        return sorted(str(path.relative_to(root)) for path in found if path.name != "__init__.py")

    def digest(self, root: Path) -> str:
        """Return a digest of the sources of this suite and of its tests."""
        parts = [root / path for path in self.paths(root)]
        for folder in self.tests:
            parts += sorted((root / folder).rglob("*.py"))
        text = b"".join(str(part.relative_to(root)).encode() + part.read_bytes() for part in parts)
        return hashlib.sha256(text).hexdigest()[:16]


_WRAPPERS = (
    "publisher", "settlement", "receiver", "control", "scripts/task_record", "scripts/receipts", "scripts/task_codec",
)  # fmt: skip
_SESSIONS = ("tests/server", "tests/worker", "tests/dashboard", "tests/security")
_STORE = ("tests/redis", "tests/model")

SUITES = {
    "protocol": Suite(("src/taskqueue_core/protocol/*.py",), _SESSIONS),
    "memory": Suite(("src/taskqueue_memory/**/*.py",), ("tests/memory",)),
    "redis": Suite(tuple(f"src/taskqueue_redis/{name}.py" for name in _WRAPPERS), _STORE),
    "lua": Suite(("src/taskqueue_redis/lua/**/*.lua", "!src/taskqueue_redis/lua/**/slots*.lua"), _STORE),
    "slots": Suite(
        (
            "src/taskqueue_redis/slots/pool.py", "src/taskqueue_redis/slots/records.py",
            "src/taskqueue_redis/lua/**/slots*.lua",
        ),
        _STORE,
    ),
    "server": Suite(
        (
            "src/taskqueue_server/**/*.py", "!src/taskqueue_server/prefect/*.py",
            "!src/taskqueue_server/process/supervisor.py", "!src/taskqueue_server/process/uvicorn_protocols.py",
            "!src/taskqueue_server/process/child.py", "!src/taskqueue_server/process/reload.py",
        ),
        _SESSIONS,
    ),
    "worker": Suite(("src/taskqueue_worker/*.py", "src/taskqueue_core/consumer/*.py"), _SESSIONS),
    "dispatcher": Suite(
        (
            "src/taskqueue_dispatch/**/*.py", "!src/taskqueue_dispatch/demo/*.py",
            "!src/taskqueue_dispatch/cli/demo.py", "!src/taskqueue_dispatch/gpu_server/__main__.py",
        ),
        ("tests/dispatch",),
    ),
    "prefect": Suite(
        ("src/taskqueue_prefect/*.py", "src/taskqueue_server/prefect/*.py"), ("tests/prefect",)
    ),
    "pipeline": Suite(("src/taskqueue_spark/**/*.py",), ("tests/spark",)),
}  # fmt: skip


def sample_of(mutants: Iterable[Mutant], size: int, seed: int) -> list[Mutant]:
    """Return ``size`` mutants, ranked by a random number derived from the seed and the mutant's own text.

    A change of one file therefore changes the choice in other files only by the number of mutants added or removed.
    """

    def rank(mutant: Mutant) -> float:
        return random.Random(f"{seed} {mutant.identity}").random()

    return sorted(
        sorted(mutants, key=rank)[:size], key=lambda mutant: (mutant.path, mutant.where.line)
    )


QUICK_TESTS = (
    "tests/server/test_session.py",
    "tests/server/test_session_frames.py",
    "tests/worker/test_client_session.py",
)
_SERVER = "src/taskqueue_core/protocol/server_session.py"
_CLIENT = "src/taskqueue_core/protocol/client_session.py"
QUICK = {
    _SERVER: (
        "boolean: if known: -> if not known:",
        "comparison: self._state is not ServerSessionState.READY -> self._state is ServerSessionState.READY",
        "arithmetic: events += self._progress(frame) -> events -= self._progress(frame)",
        "return: return [CreditGranted(n)] -> return None",
        "statement: self._credit = hello.credit -> pass",
        "boolean: if error.fatal: -> if not error.fatal:",
    ),
    _CLIENT: (
        "boolean: if self._leaving: -> if not self._leaving:",
        "boolean: not 0 < frame.lease < float('inf') -> 0 < frame.lease < float('inf')",
        "comparison: receipt in self._held -> receipt not in self._held #1",
        "comparison: self._state in _OPEN -> self._state not in _OPEN",
        "return: return self._granted -> return None",
        "statement: self._require(*_OPEN) -> pass #1",
    ),
}
"""mutants by file that every test run tries with `QUICK_TESTS`"""
