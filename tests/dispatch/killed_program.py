"""A dispatcher that kills itself with SIGKILL at a given step: ``python -m tests.dispatch.killed_program``.

Each line of standard input configures one dispatcher, as JSON (see `Told`); without a step it runs until it is killed.
The program forks a process for each dispatcher, because imports are slow. It prints the process id, then ``ready``, and
after the process has ended its exit code. Only then does it read the next line.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import wraps
from typing import Any, NoReturn, TypeVar

import msgspec

from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.service import Dispatcher
from taskqueue_redis import RedisBackend
from tests.redis.links import settings_for

T = TypeVar("T")


class Step(StrEnum):
    """The step after which the dispatcher kills itself, when it happens for the first time."""

    ACQUIRED = "acquired"
    """a slot is leased, but not assigned to a job"""
    RECEIVED = "received"
    """a job was received, but has no slot yet"""
    ASSIGNED = "assigned"
    """a job has a slot, but was not sent to the GPU server"""
    SENT = "sent"
    """the GPU server has the job, but has not answered"""
    POLLED = "polled"
    """the GPU server was asked once for the job's status"""
    ANSWERED = "answered"
    """the GPU server has answered with the result; the slot is still held"""
    REPORTED = "reported"
    """the callback is published, but the job is not settled"""
    SETTLED = "settled"
    """the job is settled; the slot may not be released yet"""


class Told(msgspec.Struct, frozen=True):
    """The configuration of one dispatcher."""

    url: str
    prefix: str
    settings: dict[str, Any]
    step: Step | None = None


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def _dying(call: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Return a wrapper of ``call`` that kills the process after the first call with a non-empty result."""

    @wraps(call)
    async def dying(*words: Any, **more: Any) -> T:
        told = await call(*words, **more)
        if told != () and not (hasattr(told, "deliveries") and not told.deliveries):
            _die()
        return told

    return dying


def _dying_while(call: Callable[..., Awaitable[T]], seconds: float) -> Callable[..., Awaitable[T]]:
    """Return a wrapper of ``call`` that kills the process ``seconds`` after a call has started."""

    @wraps(call)
    async def dying(*words: Any, **more: Any) -> T:
        asyncio.get_running_loop().call_later(seconds, _die)
        return await call(*words, **more)

    return dying


def _prepare(dispatcher: Dispatcher, backend: RedisBackend, step: Step) -> None:
    pool: Any = dispatcher.pool
    caller: Any = dispatcher.caller
    publisher: Any = backend.publisher
    match step:
        case Step.ACQUIRED:
            pool.acquire = _dying(pool.acquire)
        case Step.ASSIGNED:
            pool.assign = _dying(pool.assign)
        case Step.SENT:
            caller.send = _dying_while(caller.send, 0.1)
        case Step.POLLED:
            caller.ask = _dying(caller.ask)
        case Step.ANSWERED:
            caller.send = _dying(caller.send)
        case Step.REPORTED:
            publisher.publish = _dying(publisher.publish)
        case Step.RECEIVED | Step.SETTLED:
            subscribe: Any = backend.subscribe
            verb = "receive" if step is Step.RECEIVED else "ack"

            def subscribed(keys: Any, consumer: str) -> Any:
                subscription = subscribe(keys, consumer)
                setattr(subscription, verb, _dying(getattr(subscription, verb)))
                return subscription

            backend.subscribe = subscribed  # type: ignore[method-assign]


async def main(told: Told) -> None:
    """Run a dispatcher until the process is killed."""
    backend = RedisBackend(settings=settings_for(told.url, prefix=told.prefix, lease=1.0))
    dispatcher = Dispatcher(backend, DispatchSettings(_env_file=None, **told.settings))
    if told.step is not None:
        _prepare(dispatcher, backend, told.step)
    async with dispatcher:
        _say("ready")
        await asyncio.Event().wait()


def _say(word: object) -> None:
    print(word, flush=True)  # noqa: T201 - the parent reads it from standard output


if __name__ == "__main__":
    while line := sys.stdin.readline():
        if child := os.fork():
            _say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            _say(os.getpid())
            sys.exit(asyncio.run(main(msgspec.json.decode(line, type=Told))))
