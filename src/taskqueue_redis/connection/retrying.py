"""How long one command is tried: what follows after each failed try, and what the caller is told in the end."""

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


class Trouble:
    """What is wrong with the store at the moment, for health and the log: at most one line a second."""

    def __init__(self, shown: str, *, quiet: bool = False) -> None:
        self.text: str | None = None
        """what went wrong last, as long as nothing has worked since"""
        self.healed: Callable[[], None] | None = None
        """called when the trouble is over"""
        self._shown = shown
        self._quiet = quiet
        self._since = 0.0
        self._logged: float | None = None
        self._told = False
        self._unlogged = 0

    def note(self, failure: Failure) -> None:
        """Take note of a failed try."""
        now = time.monotonic()
        if self.text is None:
            self._since = now
        self.text = str(failure)
        if self._quiet or (self._logged is not None and now - self._logged < 1.0):
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more such since the last line)" if self._unlogged else ""
        LOGGER.warning("%s: %s%s", self._shown, self.text, more)
        self._logged, self._unlogged, self._told = now, 0, True

    @property
    def seconds(self) -> float:
        """For how long nothing has worked; 0 as long as nothing is known to be wrong."""
        return 0.0 if self.text is None else time.monotonic() - self._since

    def over(self) -> None:
        """Take note that a command was answered."""
        if self.text is None:
            return
        self.text = None
        if self.healed is not None:
            self.healed()
        if self._told:  # what was not reported need not be taken back
            self._told = False
            LOGGER.info("%s: works again after %.1f s", self._shown, time.monotonic() - self._since)


class Trial:
    """One command's tries, until ``deadline`` (the loop's time). ``rest`` waits between them, or not so long."""

    def __init__(
        self,
        deadline: float,
        trouble: Trouble,
        *,
        resend: bool,
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.deadline = deadline
        self.uncertain = False
        """whether a try may have been executed whose answer was lost"""
        self.sent = False
        """whether the command of the try that is on its way may have left"""
        self._resend = resend
        self._rest = rest
        self._trouble = trouble
        self._backoff = Backoff()
        self._at_once = 0
        self._last: Failure | None = None

    async def after(self, policy: Policy, failure: Failure) -> None:
        """Return when it is time for the next try. Raises the `Failure` that the caller is to see if there is none."""
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
                self._at_once = (
                    _REDIRECTIONS  # one idle connection that was closed is normal, two are not
                )
        else:
            pause = self._backoff.next()
        if asyncio.get_running_loop().time() + pause >= self.deadline:
            self._give_up(failure)
        await self._rest(pause)

    def expire(self, reason: str) -> NoReturn:
        """Raise what the caller is to see when the time is over in the middle of a try."""
        self.uncertain |= self.sent
        failure = NotReached(f"{reason}; before: {self._last}" if self._last else reason)
        self._trouble.note(failure)
        self._give_up(failure)

    def end(self, policy: Policy, failure: Failure) -> NoReturn:
        """Raise what the caller is to see when there is to be no other try."""
        self.uncertain |= policy is Policy.RESEND
        self._give_up(failure)

    def _give_up(self, failure: Failure) -> NoReturn:
        if self.uncertain and isinstance(failure, NotReached | Refused):
            # The last try was certainly not executed; an earlier one may have been.
            raise AnswerLost(f"an answer was lost, and then: {failure}") from None
        failure.uncertain = self.uncertain or failure.uncertain
        raise failure
