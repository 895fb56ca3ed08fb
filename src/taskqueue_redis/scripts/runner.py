"""Running the Lua scripts of `lua/`: each transition is one script, assembled from parts and called by hash."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any

from taskqueue_core.clock import Clock, SystemClock, Timer
from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.addresses import Kind
from taskqueue_redis.connection.client import Follow, Link
from taskqueue_redis.connection.errors import QueueReset, contract_error
from taskqueue_redis.connection.failures import AnswerLost, Failure, NoScript, ScriptError
from taskqueue_redis.setup.checks import ServerChecks

LAYOUT = "5"
"""the version of the stored data; it grows when older code cannot read what newer code writes"""
_REPLICATED_QUEUES = 10_000
"""queues of which it is remembered that they wait for replicas"""
_PARTS = re.compile(r"^--@ (.*)\n")
_FUNCTION = re.compile(r"^local function (\w+)", re.MULTILINE)

_log = logging.getLogger("taskqueue.redis")

Arg = bytes | str | int | float


def microseconds(time: float) -> int:
    """Convert Unix seconds to the unit of the store."""
    return round(time * 1_000_000)


def seconds(time: bytes | str | int) -> float:
    """Convert the unit of the store to Unix seconds."""
    return int(time) / 1_000_000


@cache
def source(name: str) -> str:
    """Return a script with the parts that its first line names; it reaches those after a slash by ``rarely()``."""
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
    """Wrap parts in a function: to define all their functions would cost most calls more than the call itself."""
    names = ", ".join(f"{name} = {name}" for name in _FUNCTION.findall(parts))
    return (
        "local rare\nlocal function rarely()\nif not rare then\n"
        f"{parts}rare = {{{names}}}\nend\nreturn rare\nend\n"
    )


@cache
def _digest(name: str) -> str:
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


class StoreClock:
    """The store's time, as far as this process knows it. Tests set a clock in its place."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.test_clock = clock
        self.offset = 0.0
        """seconds by which the store's clock is ahead of this process's"""
        self._clock = clock or SystemClock()

    def now(self) -> float:
        """Return the store's time."""
        return self._clock.now() + self.offset

    def call_at(self, time: float, callback: Callable[[], None]) -> Timer:
        """Call ``callback`` at a time of the store."""
        return self._clock.call_at(time - self.offset, callback)

    def learn(self, time: bytes) -> None:
        """Set the offset from a time that the store has returned."""
        if self.test_clock is None:
            self.offset = seconds(time) - self._clock.now()


class Partitions:
    """The parts of an installation. One script can touch one of them: all its keys begin with the same hash tag."""

    def __init__(self, prefix: str, number: int) -> None:
        """Name ``number`` partitions."""
        self.names = tuple(f"{{{prefix}:{n}}}" for n in range(number))

    def of(self, key: str) -> str:
        """Return the partition of a queue."""
        if len(self.names) == 1:
            return self.names[0]
        return self.names[zlib.crc32(key.encode()) % len(self.names)]

    def group(self, keys: tuple[str, ...]) -> dict[str, list[str]]:
        """Return keys by partition, in their order."""
        grouped: dict[str, list[str]] = {}
        for key in keys:
            grouped.setdefault(self.of(key), []).append(key)
        return grouped


class ScriptRunner:
    """Runs scripts on partitions. The first call installs a partition; each call detects a reset of the store."""

    def __init__(
        self, client: Link, checks: ServerChecks | None = None, clock: StoreClock | None = None
    ) -> None:
        """Do no input or output. ``checks`` are made before anything is installed."""
        settings = client.settings
        self.client = client
        self.checks = checks
        self.clock = clock or StoreClock()
        self.partitions = Partitions(settings.prefix, settings.partitions_of)
        self.resets = 0
        """how often a partition was found emptied or replaced"""
        self.promises_checked = False
        """whether the servers are known to provide the durability of every queue"""
        self._installed: dict[str, tuple[Arg, ...]] = {}
        """what each script is called with first: the keys that it declares, and the epoch of the partition"""
        self._replicated: set[str] = set()
        """keys of queues that wait for replicas, as far as is known"""

    async def run(
        self,
        name: str,
        partition: str,
        *args: Arg,
        resend: bool = True,
        follow: Follow | None = None,
    ) -> Any:
        """Run a script and return its answer. ``resend`` and ``follow`` as for `Link.command`.

        Raises `QueueReset` if the partition is not the one it was, and else the contract's errors, whose cause is a
        `taskqueue_redis.connection.failures.Failure`.
        """
        first = self._installed.get(partition)
        try:
            if first is None:
                first = await self._install(partition)
            clock = self.clock.test_clock
            args = (*first, "" if clock is None else microseconds(clock.now()), *args)
            try:
                return await self.client.command(
                    partition, "EVALSHA", _digest(name), *args, resend=resend, follow=follow
                )
            except NoScript as missing:
                return await self.client.command(
                    partition, "EVAL", source(name), *args, resend=resend, follow=follow,
                    uncertain=missing.uncertain,
                )  # fmt: skip
        except Failure as failure:
            if isinstance(failure, ScriptError) and failure.code == "RESET":
                raise self._reset(partition, first) from failure
            raise contract_error(failure) from failure

    def waits_for_replicas(self, keys: Iterable[str]) -> bool:
        """Return whether one of these queues is known to wait for replicas."""
        return not self._replicated.isdisjoint(keys)

    async def run_replicated(
        self, name: str, partition: str, keys: Iterable[str], *args: Arg
    ) -> list[Any]:
        """Run an idempotent script on queues whose answer counts only once enough replicas have what it wrote.

        The script answers how many replicas that are, and its results; return these. Raises what `run` raises: a
        `BackendUnavailable` caused by `AnswerLost` also if the replicas do not confirm in time.
        """
        reply: list[Any]
        if self._replicated.isdisjoint(keys):
            reply = await self.run(name, partition, *args)
            if not reply[0]:
                return reply[1:]
            # WAIT counts what was written by its own connection, and to the master of that moment. So the whole is
            # run again, which changes nothing where the first run counts, and repeats it after a failover between.
            if len(self._replicated) < _REPLICATED_QUEUES:
                self._replicated.update(keys)
            again, reached = await self.run(name, partition, *args, follow=self._wait)
            reply[0] = again[0]
        else:
            reply, reached = await self.run(name, partition, *args, follow=self._wait)
        if reply[0] and (reached or 0) < reply[0]:
            lost = AnswerLost(f"{reached} of {reply[0]} replicas have confirmed")
            raise contract_error(lost) from lost
        return reply[1:]

    async def check_promises(self) -> None:
        """Raise `ConfigurationError` if the servers do not provide the durability that a queue is set to."""
        if not self.promises_checked:
            for partition in self.partitions.names:
                for key, durability, replicas in await self.run("promises", partition):
                    if self.checks is not None:
                        self.checks.require(key.decode(), durability.decode(), int(replicas))
            self.promises_checked = True

    def _wait(self, reply: Any) -> Sequence[Arg] | None:
        # less than a connection waits for any answer
        timeout = self.client.settings.answer_timeout * 0.8
        return ("WAIT", reply[0], round(timeout * 1000)) if reply[0] else None

    async def _install(self, partition: str) -> tuple[Arg, ...]:
        if self.checks is not None:
            await self.checks.check_once()
        settings = self.client.settings
        # A cluster runs what declares one absent key wherever it is asked to, on either side of a slot that is moving,
        # where a part of the partition's keys is elsewhere. What declares two is refused until all have moved.
        keys: tuple[Arg, ...] = (1, partition)
        if settings.address.kind is Kind.CLUSTER:
            keys = 2, partition, f"{partition}:nothing"
        number = str(len(self.partitions.names))
        reply = await self.client.command(
            partition, "EVAL", source("install"), *keys,
            secrets.token_hex(8), LAYOUT, number, settings.journal_length or "",
        )  # fmt: skip
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
        self._installed[partition] = first = (*keys, epoch)
        return first

    def _reset(self, partition: str, first: tuple[Arg, ...] | None) -> QueueReset:
        if self._installed.get(partition) == first:
            del self._installed[partition]
            self.resets += 1
            _log.error("%s was emptied or replaced; its data is lost", partition)
        return QueueReset(f"the partition {partition} was emptied or replaced; its data is lost")
