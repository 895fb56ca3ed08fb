"""Running the Lua scripts in ``lua/``. Each state change is one script, assembled from parts and called by its hash."""

from __future__ import annotations

import logging
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from taskqueue_core.clock import Clock, SystemClock, Timer
from taskqueue_redis.addresses import Kind
from taskqueue_redis.connection.client import Follow, RedisClient
from taskqueue_redis.connection.errors import QueueReset, contract_error
from taskqueue_redis.connection.failures import (
    AnswerLost,
    Failure,
    Misconfigured,
    NoScript,
    ScriptError,
)
from taskqueue_redis.scripts import assembly
from taskqueue_redis.setup.checks import ServerChecks

LAYOUT = "8"
"""version of the data format in Redis; increased when older code cannot read what newer code writes"""
_REPLICATED_QUEUES = 10_000
"""maximum number of queues that a process remembers as waiting for replicas"""
_AT_ONCE = 250
"""maximum number of items per script call"""
_EXPECTED = frozenset({"RESET", "GONE", "LATE"})
"""codes of errors that scripts return on purpose"""
_REPAIR_SECONDS = 5.0
"""minimum number of seconds between two repairs of a partition, and between two reports of an unfit store"""

_log = logging.getLogger("taskqueue.redis")

Arg = bytes | str | int | float


def microseconds(time: float) -> int:
    """Convert Unix seconds to microseconds, the unit of the store."""
    return round(time * 1_000_000)


def seconds(time: bytes | str | int) -> float:
    """Convert microseconds, the unit of the store, to Unix seconds."""
    return int(time) / 1_000_000


class StoreClock:
    """The time of the store, computed from this process's monotonic clock and an offset for each partition.

    Partitions may be on servers whose clocks differ. A test may pass a clock that replaces the store's time.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.test_clock = clock
        self.local = clock or SystemClock()
        """clock for waits in this process, which no change of the store's clock affects"""
        self.offsets = {"": 0.0}
        """by partition, seconds by which the store's time is ahead of `local`; under ``""`` the last one learned"""

    def now(self, partition: str = "") -> float:
        """Return the time in a partition; if that is unknown, the time in the partition that answered last."""
        return self.local.now() + self._offset(partition)

    def call_at(self, time: float, callback: Callable[[], None], partition: str) -> Timer:
        """Run the callback once, at a time in a partition."""
        return self.local.call_at(time - self._offset(partition), callback)

    def learn(self, partition: str, time: bytes) -> None:
        """Compute the offset from the time that a partition has just returned, unless a test passed a clock."""
        if self.test_clock is None:
            self.offsets[partition] = self.offsets[""] = seconds(time) - self.local.now()

    def _offset(self, partition: str) -> float:
        return self.offsets.get(partition, self.offsets[""])


class Partitions:
    """The partitions of an installation. A script accesses only one, whose keys all begin with the same hash tag."""

    def __init__(self, prefix: str, number: int) -> None:
        self.names = tuple(f"{{{prefix}:{n}}}" for n in range(number))

    def of(self, key: str) -> str:
        """Return the name of the partition that holds a queue."""
        if len(self.names) == 1:
            return self.names[0]
        return self.names[zlib.crc32(key.encode()) % len(self.names)]

    def group(self, keys: tuple[str, ...]) -> dict[str, list[str]]:
        """Group queue keys by partition, keeping their order."""
        grouped: dict[str, list[str]] = {}
        for key in keys:
            grouped.setdefault(self.of(key), []).append(key)
        return grouped


class ScriptRunner:
    """Runs scripts. The first call for a partition installs it; each call detects whether its partition was emptied."""

    def __init__(
        self,
        client: RedisClient,
        checks: ServerChecks | None = None,
        clock: StoreClock | None = None,
    ) -> None:
        """Create a runner, which runs ``checks`` before it installs anything in the store."""
        settings = client.settings
        self.client = client
        self.checks = checks
        self.clock = clock or StoreClock()
        self.partitions = Partitions(settings.prefix, settings.partitions_of)
        self.resets = 0
        """number of times that a partition was found emptied or replaced"""
        self.promises_checked = False
        """whether the servers are known to provide the durability that each queue requires"""
        self._installed: dict[str, tuple[Arg, ...]] = {}
        """by partition, the arguments that begin each script call: the declared keys, and the partition's epoch"""
        self._started = False
        """whether a partition was usable before; from then on, a store that does not fit counts as an outage"""
        self._reported = -_REPAIR_SECONDS
        """time of the last report of such a store in the log"""
        self._repaired: dict[str, float] = {}
        """by partition, the time of the last repair, on the monotonic clock"""
        self._replicated: set[str] = set()
        """keys of queues whose writes are known to wait for replicas"""

    async def run(
        self,
        name: str,
        partition: str,
        *args: Arg,
        resend: bool = True,
        follow: Follow | None = None,
    ) -> Any:
        """Run a script and return its answer. ``resend`` and ``follow`` are passed to `RedisClient.command`.

        Raises `QueueReset` if the partition was emptied or replaced. For other failures, raises an error of the backend
        contract, whose cause is a `taskqueue_redis.connection.failures.Failure`.
        """
        first = self._installed.get(partition)
        try:
            if first is None:
                first = await self._install(partition)
            clock = self.clock.test_clock
            args = (*first, "" if clock is None else microseconds(clock.now()), *args)
            try:
                return await self.client.command(
                    partition,
                    "EVALSHA",
                    assembly.script_digest(name),
                    *args,
                    resend=resend,
                    follow=follow,
                )
            except NoScript as missing:
                return await self.client.command(
                    partition, "EVAL", assembly.source(name), *args, resend=resend, follow=follow,
                    uncertain=missing.uncertain,
                )  # fmt: skip
        except Failure as failure:
            if isinstance(failure, ScriptError):
                if failure.code == "RESET":
                    raise self._reset(partition, first) from failure
                if failure.code not in _EXPECTED and first is not None:
                    await self._repair(partition, first, failure)
                elif first is None:
                    unfit = self._unfit(
                        f"the store cannot be installed in {partition} ({failure}): another program already uses "
                        "a key name of the store; set TASKQUEUE_REDIS_PREFIX to another prefix"
                    )
                    raise contract_error(unfit) from failure
            raise contract_error(failure) from failure

    async def run_each(
        self,
        name: str,
        partition: str,
        first: Sequence[Arg],
        items: Sequence[Sequence[Arg]],
        at_once: int = _AT_ONCE,
    ) -> list[Any]:
        """Run a script for items, and return an answer per item. Each call passes ``first`` and some of the items.

        The script answers only the first items of a call if they are so large that more would block Redis for long.
        """
        answers: list[Any] = []
        while len(answers) < len(items):
            some = items[len(answers) : len(answers) + at_once]
            answers += await self.run(name, partition, *first, *chain.from_iterable(some))
        return answers

    async def run_pages(self, name: str, partition: str, *args: Arg) -> list[Any]:
        """Run a script that lists something once per page, and return all items; an item may occur twice.

        The last argument of the script is a cursor. It returns the cursor of the next page, followed by items.
        """
        items: list[Any] = []
        cursor = b"0"
        while True:
            cursor, *page = await self.run(name, partition, *args, cursor)
            items += page
            if cursor == b"0":
                return items

    def waits_for_replicas(self, keys: Iterable[str]) -> bool:
        """Return whether at least one of these queues is known to wait for replicas."""
        return not self._replicated.isdisjoint(keys)

    async def run_replicated(
        self, name: str, partition: str, keys: Iterable[str], *args: Arg
    ) -> list[Any]:
        """Run an idempotent script, and wait until enough replicas have its writes if a queue requires that.

        The script returns the required number of replicas, followed by its results; only the results are returned.
        Raises the errors of `run`, and `BackendUnavailable` caused by `AnswerLost` if replicas do not confirm in time.
        """
        reply: list[Any]
        if self._replicated.isdisjoint(keys):
            reply = await self.run(name, partition, *args)
            if not reply[0]:
                return reply[1:]
            # WAIT covers only writes of its own connection to the current master. So run the script again, followed
            # by WAIT. The second run changes nothing, unless a failover in between has undone the first run.
            if len(self._replicated) < _REPLICATED_QUEUES:
                self._replicated.update(keys)
            again, reached = await self.run(name, partition, *args, follow=self._wait)
            reply[0] = again[0]
        else:
            reply, reached = await self.run(name, partition, *args, follow=self._wait)
        if reply[0] and (reached or 0) < reply[0]:
            lost = AnswerLost(f"only {reached} of {reply[0]} replicas have confirmed the writes")
            raise contract_error(lost) from lost
        return reply[1:]

    async def check_promises(self) -> None:
        """Raise `ConfigurationError` if the servers lack the durability of a queue. Skipped after the first success."""
        if not self.promises_checked:
            for partition in self.partitions.names:
                for key, durability, replicas in await self.run_pages("promises", partition):
                    if self.checks is not None:
                        self.checks.require(key.decode(), durability.decode(), int(replicas))
            self.promises_checked = True

    def _wait(self, reply: Any) -> Sequence[Arg] | None:
        # WAIT must return before `answer_timeout`, after which the connection is closed for lack of an answer.
        timeout = self.client.settings.answer_timeout * 0.8
        return ("WAIT", reply[0], round(timeout * 1000)) if reply[0] else None

    async def _install(self, partition: str) -> tuple[Arg, ...]:
        if self.checks is not None:
            await self.checks.check_once()
        settings = self.client.settings
        # While a cluster moves a slot, both nodes would run a script that declares one absent key, although some keys
        # of the partition are on the other node. A script that declares two keys is refused until the move has ended.
        keys: tuple[Arg, ...] = (1, partition)
        if settings.address.kind is Kind.CLUSTER:
            keys = 2, partition, f"{partition}:nothing"
        number = str(len(self.partitions.names))
        digests = {None: "", True: "yes", False: "no"}[settings.journal_digests]
        reply = await self.client.command(
            partition, "EVAL", assembly.source("install"), *keys,
            secrets.token_hex(8), LAYOUT, number, settings.journal_length or "", digests,
        )  # fmt: skip
        epoch, layout, partitions = (str(value, "ascii") for value in reply)
        if layout != LAYOUT:
            raise self._unfit(
                f"the store has layout {layout}, but this version writes {LAYOUT}: "
                "use the version that wrote the data, or another TASKQUEUE_REDIS_PREFIX"
            )
        if partitions != number:
            raise self._unfit(
                f"the store was installed with TASKQUEUE_REDIS_PARTITIONS={partitions}, not {number}: "
                f"set it to {partitions}"
            )
        self._installed[partition] = first = (*keys, epoch)
        self._started = True
        return first

    def _unfit(self, text: str) -> Misconfigured:
        failure = Misconfigured(text)
        failure.started = self._started
        if self._started and (now := time.monotonic()) >= self._reported + _REPAIR_SECONDS:
            self._reported = now
            _log.error("%s", text)
        return failure

    async def _repair(self, partition: str, first: tuple[Arg, ...], failure: ScriptError) -> None:
        """Repair keys of a partition that make scripts fail. The failed call is not repeated here."""
        now = time.monotonic()
        if now < self._repaired.get(partition, -_REPAIR_SECONDS) + _REPAIR_SECONDS:
            return
        self._repaired[partition] = now
        _log.error("a script failed in %s (%s); checking the types of its keys", partition, failure)
        cursor = b"0"
        length = self.client.settings.journal_length or 1_000_000
        args = LAYOUT, str(len(self.partitions.names)), length
        try:
            while True:
                cursor = await self.client.command(
                    partition, "EVAL", assembly.source("repair"), *first, "", cursor, *args
                )
                if cursor == b"0":
                    break
        except Failure as error:
            _log.error("could not repair %s: %s", partition, error)

    def _reset(self, partition: str, first: tuple[Arg, ...] | None) -> QueueReset:
        if self._installed.get(partition) == first:
            del self._installed[partition]
            self.resets += 1
            _log.error("%s was emptied or replaced; its data is lost", partition)
        return QueueReset(f"the partition {partition} was emptied or replaced; its data is lost")
