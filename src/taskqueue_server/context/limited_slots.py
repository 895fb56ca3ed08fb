"""Room for so many at once, of which nobody takes all: for those who wait at a server and hold nothing else of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from taskqueue_server.problems import ProblemError

__all__ = ["LimitedSlots"]


class LimitedSlots:
    """Counts who is in, by name. Who has a name leaves half of the places to others."""

    def __init__(self, most: int, code: str, doing: str, retry_after: int = 1) -> None:
        """There is room for ``most``; ``code`` and what they are ``doing`` tell of it to one for whom there is none."""
        self._most = most
        self._code = code
        self._doing = doing
        self._headers = {"retry-after": str(retry_after)}
        self._per_client: Counter[str | None] = Counter()

    def __len__(self) -> int:
        """How many are in."""
        return self._per_client.total()

    @contextmanager
    def acquire(self, client: str | None) -> Iterator[None]:
        """Take a place for the block. Raises `ProblemError` where there is none, or where ``who`` has enough."""
        if len(self) >= self._most:
            raise self._problem(503, f"{self._most} {self._doing} already")
        if client is not None and self._per_client[client] >= self._most // 2:
            raise self._problem(429, f"{self._most // 2} {self._doing} with this token already")
        self._per_client[client] += 1
        try:
            yield
        finally:
            self._per_client[client] -= 1
            self._per_client += Counter()  # forgets who is out

    def _problem(self, status: int, detail: str) -> ProblemError:
        return ProblemError(status, self._code, detail, headers=self._headers)
