"""Retrying a command: whether and when to try again after a failure, and which error the caller gets in the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from taskqueue_redis.connection.failures import AnswerLost, Failure, NotReached, Policy, Refused
from taskqueue_redis.connection.nodes import Backoff

LOGGER = logging.getLogger("taskqueue.redis")

_AGAIN = {Policy.WAIT, Policy.SEEK, Policy.MOVED, Policy.ASK, Policy.RESEND}
_AT_ONCE = {Policy.MOVED, Policy.ASK, Policy.RESEND}
_REDIRECTIONS = 5


class OutageLog:
    """The current outage of the store, reported by health and in the log, with at most one line per second."""

    def __init__(self, shown: str, *, quiet: bool = False) -> None:
        self.text: str | None = None
        """the last failure; None if a command has succeeded since"""
        self.healed: Callable[[], None] | None = None
        """called when the first command after an outage succeeds"""
        self._shown = shown
        self.quiet = quiet
        self._since = 0.0
        self._logged: float | None = None
        self._reported = False
        self._unlogged = 0

    def note(self, failure: Failure) -> None:
        """Record a failed attempt, and log it unless another one was logged within the last second."""
        now = time.monotonic()
        if self.text is None:
            self._since = now
        self.text = str(failure)
        if self.quiet or (self._logged is not None and now - self._logged < 1.0):
            self._unlogged += 1
            return
        more = f" (failures not logged before: {self._unlogged})" if self._unlogged else ""
        LOGGER.warning("%s: %s%s", self._shown, self.text, more)
        self._logged, self._unlogged, self._reported = now, 0, True

    @property
    def seconds(self) -> float:
        """Seconds since the first failure of the current outage; 0 if there is no outage."""
        return 0.0 if self.text is None else time.monotonic() - self._since

    def over(self) -> None:
        """End the outage, if there is one, because a command was answered."""
        if self.text is None:
            return
        self.text = None
        if self.healed is not None:
            self.healed()
        if self._reported:  # the end of an outage is logged only if its start was
            self._reported = False
            LOGGER.info("%s: works again after %.1f s", self._shown, time.monotonic() - self._since)


class RetryState:
    """The attempts to run one command, until ``deadline`` (event loop time).

    ``resend``: the command may be sent again if its answer was lost. ``rest`` waits between two attempts, for at most
    the given number of seconds.
    """

    def __init__(
        self,
        deadline: float,
        trouble: OutageLog,
        *,
        resend: bool,
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.deadline = deadline
        self.uncertain = False
        """whether the answer to an attempt was lost, so Redis may have executed the command"""
        self.sent = False
        """whether the current attempt may have sent the command"""
        self.quiet = trouble.quiet
        self._resend = resend
        self._rest = rest
        self._trouble = trouble
        self._backoff = Backoff()
        self._at_once = 0
        self._last: Failure | None = None

    async def after(self, policy: Policy, failure: Failure) -> None:
        """Wait until the next attempt is due. Raise the `Failure` for the caller if no further attempt is allowed."""
        self.uncertain |= policy is Policy.RESEND
        self._last = failure
        if policy not in _AGAIN:
            if policy is not Policy.RAISE and policy is not Policy.LOAD:
                self._trouble.note(failure)
            self._give_up(failure)
        if policy is not Policy.MOVED and policy is not Policy.ASK:
            self._trouble.note(failure)
        if policy is Policy.RESEND and not self._resend:
            self._give_up(failure)
        pause = 0.0
        if policy in _AT_ONCE and self._at_once < _REDIRECTIONS:
            self._at_once += 1
            if policy is Policy.RESEND:
                # Allow only one immediate retry, because one closed idle connection is normal, but two are not.
                self._at_once = _REDIRECTIONS
        else:
            pause = self._backoff.next()
        if asyncio.get_running_loop().time() + pause >= self.deadline:
            self._give_up(failure)
        await self._rest(pause)

    def expire(self, reason: str) -> NoReturn:
        """Raise the failure for the caller, because the time limit passed during an attempt."""
        self.uncertain |= self.sent
        failure = NotReached(f"{reason}; last failure: {self._last}" if self._last else reason)
        self._trouble.note(failure)
        self._give_up(failure)

    def end(self, policy: Policy, failure: Failure) -> NoReturn:
        """Raise the failure for the caller without another attempt, because the client was closed."""
        self.uncertain |= policy is Policy.RESEND
        self._give_up(failure)

    def _give_up(self, failure: Failure) -> NoReturn:
        if self.uncertain and isinstance(failure, NotReached | Refused):
            # The last attempt was certainly not executed, but an earlier one may have been.
            raise AnswerLost(f"an answer was lost, then a retry failed: {failure}") from None
        failure.uncertain = self.uncertain or failure.uncertain
        raise failure
