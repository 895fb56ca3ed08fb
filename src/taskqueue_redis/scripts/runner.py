"""The transitions: each is one Lua script in `lua/`, put together from its parts and called by its hash."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any

from taskqueue_core.clock import Clock
from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.addresses import Kind
from taskqueue_redis.connection.client import Link
from taskqueue_redis.connection.errors import QueueReset
from taskqueue_redis.connection.failures import NoScript, ScriptError
from taskqueue_redis.scripts.keys import Partitions

LAYOUT = "5"
"""grows when older versions could not read what newer ones write"""
_PARTS = re.compile(r"^--@ (.*)\n")
_FUNCTION = re.compile(r"^local function (\w+)", re.MULTILINE)

_log = logging.getLogger("taskqueue.redis")

Arg = bytes | str | int | float


def microseconds(time: float) -> int:
    """Turn Unix seconds into the unit of the store."""
    return round(time * 1_000_000)


def seconds(time: bytes | str | int) -> float:
    """Turn the unit of the store into Unix seconds."""
    return int(time) / 1_000_000


@cache
def source(name: str) -> str:
    """Return a script with the parts that its first line names; those after a slash it finds in ``rarely()``."""
    folder = resources.files("taskqueue_redis") / "lua"
    text = (folder / f"{name}.lua").read_text()
    named = _PARTS.match(text)
    if named is None:
        return text
    always, _, rarely = named[1].partition("/")
    parts = [_part(part) for part in always.split()]
    if rarely:
        parts.append(_lazily("".join(_part(part) for part in rarely.split())))
    return "".join([*parts, text])


def _part(name: str) -> str:
    return (resources.files("taskqueue_redis") / "lua" / "lib" / f"{name}.lua").read_text()


def _lazily(parts: str) -> str:
    """Put parts into a function, as making functions costs a script that is done in microseconds too much."""
    names = ", ".join(f"{name} = {name}" for name in _FUNCTION.findall(parts))
    return (
        "local rare\nlocal function rarely()\nif not rare then\n"
        f"{parts}rare = {{{names}}}\nend\nreturn rare\nend\n"
    )


@cache
def _digest(name: str) -> str:
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


class Scripts:
    """Runs scripts on partitions. The first call installs them; a reset of the store is noticed by the next one."""

    def __init__(
        self,
        link: Link,
        prefix: str,
        partitions: int,
        clock: Clock | None,
        check: Callable[[], Awaitable[None]] | None = None,
        *,
        journal_length: int | None = None,
    ) -> None:
        """Do no input or output. A ``clock`` is for tests. ``check`` is awaited before anything is installed."""
        self._check = check
        self._journal_length = journal_length
        self._link = link
        self._prefix = prefix
        self._clock = clock
        self._clustered = link.settings.address.kind is Kind.CLUSTER
        self._epochs: dict[str, str] = {}
        self.partitions = Partitions(prefix, partitions)
        self.resets = 0
        """how often the store turned out to be another one than before"""

    async def run(
        self,
        name: str,
        partition: str,
        *args: Arg,
        resend: bool = True,
        follow: Callable[[Any], Sequence[Any] | None] | None = None,
    ) -> Any:
        """Run a script and return its answer.

        Raises `QueueReset` if the partition is not the one it was, and the errors of
        `taskqueue_redis.connection.failures`.
        """
        epoch = self._epochs.get(partition) or await self._install(partition)
        now: Arg = "" if self._clock is None else microseconds(self._clock.now())
        arguments = (*self._declared(partition), epoch, now, *args)
        try:
            return await self._evaluate(name, partition, arguments, resend=resend, follow=follow)
        except ScriptError as error:
            if error.code != "RESET":
                raise
            if self._epochs.get(partition) == epoch:
                del self._epochs[partition]
                self.resets += 1
                _log.error("%s was emptied or replaced; its data is lost", partition)
            raise QueueReset(
                f"the partition {partition} was emptied or replaced; its data is lost"
            ) from error

    def _declared(self, partition: str) -> tuple[Arg, ...]:
        """Return the keys that a script declares, behind their number.

        A cluster runs what declares one absent key wherever it is asked to, on either side of a slot that is moving,
        where a part of the partition's keys is elsewhere. What declares two is told to try again until all have moved.
        """
        if self._clustered:
            return 2, partition, f"{partition}:nothing"
        return 1, partition

    async def _evaluate(
        self,
        name: str,
        partition: str,
        arguments: tuple[Arg, ...],
        *,
        resend: bool = True,
        follow: Callable[[Any], Sequence[Any] | None] | None = None,
    ) -> Any:
        try:
            return await self._link.command(
                partition, "EVALSHA", _digest(name), *arguments, resend=resend, follow=follow
            )
        except NoScript as missing:
            return await self._link.command(
                partition, "EVAL", source(name), *arguments, resend=resend, follow=follow,
                uncertain=missing.uncertain,
            )  # fmt: skip

    async def _install(self, partition: str) -> str:
        if self._check is not None:
            await self._check()
        fresh = secrets.token_hex(8)
        number = str(len(self.partitions.names))
        reply = await self._evaluate(
            "install",
            partition,
            (*self._declared(partition), fresh, LAYOUT, number, self._journal_length or ""),
        )
        epoch, layout, partitions = (str(value, "ascii") for value in reply)
        if layout != LAYOUT:
            raise ConfigurationError(
                f"the store has layout {layout}, this version writes {LAYOUT}: "
                "use the version that wrote it, or another TASKQUEUE_REDIS_PREFIX"
            )
        if partitions != number:
            raise ConfigurationError(
                f"the store was installed with {partitions} partitions, not {number}: set TASKQUEUE_REDIS_PARTITIONS"
            )
        self._epochs[partition] = epoch
        return epoch
