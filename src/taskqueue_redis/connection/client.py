"""The Redis client of this package: an error says whether the command may have been executed.

If an answer is lost, other client libraries send the command again without telling the caller, so it may be executed
twice. This client does so only if the command was certainly not executed, or if the caller allows it with ``resend``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.addresses import HostAddress, Kind
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.connection import RedisConnection, Word
from taskqueue_redis.connection.failures import (
    AnswerLost,
    ErrorReply,
    Failure,
    Lost,
    Misconfigured,
    NotReached,
    Policy,
    Unreachable,
    classify,
    classify_connecting,
    in_script,
    says_denied,
    says_login,
)
from taskqueue_redis.connection.nodes import Node
from taskqueue_redis.connection.retrying import OutageLog, RetryState

if TYPE_CHECKING:
    from taskqueue_redis.connection.topology import Topology

Follow: TypeAlias = Callable[[Any], "Sequence[Word] | None"]
Ask: TypeAlias = Callable[["Sequence[Word]"], Awaitable[Any]]
T = TypeVar("T")

# A process that is forked during an import waits for ever if it imports the same module.
_importing = threading.RLock()
os.register_at_fork(
    before=_importing.acquire,
    after_in_parent=_importing.release,
    after_in_child=_importing.release,
)


class _Order(NamedTuple):
    """A command, and a function that is called with the reply and may return a second command."""

    words: tuple[Word, ...]
    follow: Follow | None


class RedisClient:
    """A client of one Redis installation, used concurrently by any number of tasks of one event loop.

    It connects on first use, and again after each loss of a connection. A call may be cancelled at any moment; if its
    answer arrives later, the answer is dropped.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        self.trouble = OutageLog(settings.address.shown)
        self.started = False
        """whether the servers were checked successfully; from then on, configuration errors count as an outage"""
        self._topology = _topology(settings)
        self._only: Node | None = None
        """the node of a single server; None for Sentinels and clusters"""
        if settings.address.kind is Kind.SINGLE:
            self._only = self._topology.node(settings.address.hosts[0])
        self._closed = False
        self._over = asyncio.Event()
        """set by `aclose`, to end the pauses between attempts"""

    async def command(
        self,
        key: str,
        *words: Word,
        resend: bool = True,
        follow: Follow | None = None,
        uncertain: bool = False,
    ) -> Any:
        """Run a command on the server that holds ``key``, and return the raw reply: bytes, int, list or None.

        ``resend``: the command is idempotent, so send it again if its answer was lost, until
        TASKQUEUE_REDIS_OPERATION_TIMEOUT. Without ``resend``, a command that may have been executed is not sent
        again. A command that Redis refused to execute (LOADING, MOVED, …) is sent again in any case.

        ``follow`` is called with the reply, and returns a second command for the same connection, or None. The result
        is then a pair: the two replies, or the only reply and None. Redis must answer the second command within
        TASKQUEUE_REDIS_ANSWER_TIMEOUT. If the second command fails, both commands count as unanswered.

        ``uncertain``: an earlier call may already have executed the command, for example a call that failed with an
        uncertain `NoScript`. No failure then claims that the command was not executed.

        Raises a `Failure`.
        """
        now = asyncio.get_running_loop().time()
        node = (self._only or self._topology.find(key)) if follow is None else None
        connection = node.connection if node is not None else None
        reply: Any = None
        if connection is not None and connection.open and not connection.crowd.locked():
            await connection.crowd.acquire()  # returns at once, because the semaphore is not locked
            try:
                reply = await connection.ask(words, now)
            except Lost as lost:
                reply = lost
            else:
                if not isinstance(reply, ErrorReply):
                    if self.trouble.text is not None:
                        self.trouble.over()
                    return reply
        deadline = now + self.settings.operation_timeout
        trial = RetryState(deadline, self.trouble, resend=resend, rest=self._rest)
        trial.uncertain = uncertain
        return await self._persist(trial, key, _Order(words, follow), node, reply)

    async def everywhere(self, *words: Word, quietly: bool = False) -> list[Any]:
        """Run an idempotent command on every master and return all replies. Raises a `Failure` if any reply is missing.

        ``quietly``: do not log a failure, and do not count it in the health status.
        """
        return await self.at_each_master(lambda ask: ask(words), quietly=quietly)

    async def at_each_master(
        self, do: Callable[[Ask], Awaitable[T]], *, quietly: bool = True
    ) -> list[T]:
        """For each master, call ``do`` with a function that runs idempotent commands there; return the results.

        ``quietly``: do not log a failure, and do not count it in the health status. Raises the first `Failure`.
        """
        deadline = asyncio.get_running_loop().time() + self.settings.operation_timeout
        trouble = OutageLog(self.settings.address.shown, quiet=True) if quietly else self.trouble
        nodes = await self._masters(RetryState(deadline, trouble, resend=True, rest=self._rest))

        def asking(node: Node) -> Ask:
            def ask(words: Sequence[Word]) -> Awaitable[Any]:
                trial = RetryState(deadline, trouble, resend=True, rest=self._rest)
                return self._persist(trial, node, _Order(tuple(words), None))

            return ask

        found: list[T] = []
        done = await asyncio.gather(*(do(asking(node)) for node in nodes), return_exceptions=True)
        for reply in done:
            if isinstance(reply, BaseException):
                raise reply
            found.append(reply)
        return found

    async def listener(
        self, avoid: HostAddress | None = None
    ) -> tuple[HostAddress, RedisConnection]:
        """Open a connection to a master, preferably not ``avoid``. Return the master's address and the connection.

        The caller must close the connection. Any master delivers the pub/sub messages of the whole installation.
        Raises a `Failure`.
        """
        problem: Unreachable | None = None
        if self._closed:
            raise NotReached("the client was closed")
        try:
            nodes = await self._topology.masters()
            random.shuffle(nodes)  # spreads the connections of many processes over the masters
            nodes.sort(key=lambda node: node.place == avoid)
            for node in nodes:
                try:
                    return node.place, await self._topology.connector.open(node.place)
                except Unreachable as error:
                    self._topology.doubt(node)
                    problem = error
        except Unreachable as error:
            problem = error
        raise self._classify(problem)[1] if problem else NotReached("no server is known") from None

    def when_reopened(self, call: Callable[[], None]) -> None:
        """Register a function that is called after each reconnection, because the server may have been restarted."""
        self._topology.reopened = call

    def refused(self, reply: ErrorReply) -> Failure:
        """Return the failure for an error reply on a connection of `listener`."""
        return self._classify(reply)[1]

    def in_charge(self, place: HostAddress) -> bool:
        """Return whether the server at ``place`` is a master, as far as this process knows."""
        return self._topology.in_charge(place)

    async def aclose(self) -> None:
        """Close every connection. Calls that wait for an answer or for their next attempt fail. Idempotent."""
        self._closed = True
        self._over.set()
        await self._topology.aclose()

    async def _rest(self, pause: float) -> None:
        if not pause:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._over.wait()

    async def _masters(self, trial: RetryState) -> list[Node]:
        while True:
            try:
                async with asyncio.timeout_at(trial.deadline):
                    return await self._topology.masters()
            except Unreachable as error:
                self._topology.doubt(None)
                policy, failure = self._classify(error)
                if self._closed:
                    trial.end(policy, failure)
                await trial.after(policy, failure)
            except TimeoutError:
                trial.expire("no server returned the list of servers in time")

    async def _persist(
        self,
        trial: RetryState,
        target: str | Node,
        order: _Order,
        node: Node | None = None,
        problem: object = None,
    ) -> Any:
        # `problem` is the error of an attempt that the caller has made at `node`; None if it has made none.
        once: Node | None = None
        while True:
            if problem is not None:
                policy, failure = self._classify(problem, probing=trial.quiet)
                try:
                    once = self._learn(policy, problem, node)
                except (ValueError, ConfigurationError) as error:  # an invalid redirection
                    once, unreachable = None, Unreachable(*classify_connecting(error))
                    policy, failure = self._classify(unreachable)
                if self._closed:
                    trial.end(policy, failure)
                await trial.after(policy, failure)
            trial.sent = False
            try:
                async with asyncio.timeout_at(trial.deadline):
                    node = target if isinstance(target, Node) else once
                    node = node or await self._topology.locate(str(target))
                    run = _shared if order.follow is None else _followed
                    reply = await run(node, order, trial, asking=node is once)
            except (Unreachable, Lost) as error:
                problem = error
            except TimeoutError:
                trial.expire("TASKQUEUE_REDIS_OPERATION_TIMEOUT has passed")
            else:
                if not isinstance(reply, ErrorReply):
                    self.trouble.over()
                    return reply
                problem = reply

    def _classify(self, problem: object, *, probing: bool = False) -> tuple[Policy, Failure]:
        if isinstance(problem, Lost):
            if problem.sent:
                return Policy.RESEND, AnswerLost(problem.reason)
            return Policy.SEEK, NotReached(problem.reason)
        if isinstance(problem, Unreachable):
            policy, failure = problem.policy, problem.failure
        else:
            assert isinstance(problem, ErrorReply)  # noqa: S101 - callers pass no other type
            policy, failure = classify(problem)
            probing |= not (says_denied(failure) or says_login(failure))
        if policy is Policy.REPAIR and self.started and not probing:
            # The script lacked a right and ended in the middle, so a part of it may have been executed.
            if isinstance(problem, ErrorReply) and in_script(str(problem)):
                return Policy.RESEND, AnswerLost(str(failure))
            return Policy.SEEK, NotReached(str(failure))
        if isinstance(failure, Misconfigured):
            failure.started = self.started
        return policy, failure

    def _learn(self, policy: Policy, problem: object, node: Node | None) -> Node | None:
        """Update the topology after a failed attempt. Return the node for the next attempt if Redis named one."""
        if policy is Policy.SEEK or policy is Policy.RESEND:
            self._topology.doubt(node)
        if policy is Policy.MOVED or policy is Policy.ASK:
            slot, place = self._topology.redirection(str(problem), node)
            if policy is Policy.ASK:
                return self._topology.node(place)
            self._topology.moved(slot, place)
        return None


async def _shared(node: Node, order: _Order, trial: RetryState, *, asking: bool) -> Any:
    connection = await node.reach()
    for _ in range(asking + 1):
        await connection.crowd.acquire()
    trial.sent = True
    now = asyncio.get_running_loop().time()
    if asking:
        # Nothing is awaited before the next call, so no other command is sent between ASKING and the command.
        connection.ask(("ASKING",), now)
    return await connection.ask(order.words, now)


async def _followed(node: Node, order: _Order, trial: RetryState, *, asking: bool) -> Any:
    async with node.exclusive() as connection:
        trial.sent = True
        try:
            if asking:
                await connection.call("ASKING")
            reply = await connection.call(*order.words)
        except ErrorReply as error:
            return error
        more = order.follow(reply) if order.follow is not None else None
        if more is None:
            return reply, None
        try:
            return reply, await connection.call(*more)
        except ErrorReply as error:
            # The second command was to confirm the first one. It has failed, so both count as unanswered.
            raise Lost(f"{more[0]!s} failed: {classify(error)[1]}", sent=True) from None


def _topology(settings: RedisSettings) -> Topology:
    # Imported when a client is created, because the import of redis-py takes half a second.
    with _importing:
        from taskqueue_redis.connection.cluster import ClusterTopology  # noqa: PLC0415
        from taskqueue_redis.connection.connector import Connector  # noqa: PLC0415
        from taskqueue_redis.connection.sentinel import SentinelTopology  # noqa: PLC0415
        from taskqueue_redis.connection.topology import Topology  # noqa: PLC0415
    kinds = {Kind.SINGLE: Topology, Kind.SENTINEL: SentinelTopology, Kind.CLUSTER: ClusterTopology}
    return kinds[settings.address.kind](Connector(settings))
