"""Pipelines and groups of dramatiq, on its Redis broker. It has no scheduler."""

from __future__ import annotations

import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import GroupCallbacks
from dramatiq.rate_limits.backends import RedisBackend
from flow import BROKER, effect, main

HEARTBEAT = 10_000
"""milliseconds after which the messages of a dead worker are delivered again; the default is a minute"""
OFTEN = 100_000
"""how many of a million calls look for dead workers; the default is 1,000"""
broker = RedisBroker(url=BROKER, heartbeat_timeout=HEARTBEAT, maintenance_chance=OFTEN)
broker.add_middleware(GroupCallbacks(RedisBackend(url=BROKER)))
dramatiq.set_broker(broker)


@dramatiq.actor
def step(name: str, pause: float) -> None:
    """Run one step of a pipeline."""
    effect("step", name, pause)


@dramatiq.actor
def member(name: str, pause: float) -> None:
    """Run one member of a group."""
    effect("member", name, pause)


@dramatiq.actor
def done() -> None:
    """Run once all members are done."""
    effect("callback", 0)


def worker() -> None:
    """Run a worker with two threads."""
    dramatiq.Worker(broker, worker_threads=2).start()
    while True:
        time.sleep(60)


def chains(number: float, steps: float, pause: float) -> None:
    """Publish pipelines."""
    for n in range(int(number)):
        dramatiq.pipeline(
            step.message_with_options(args=(f"{n}.{m}", pause), pipe_ignore=True)
            for m in range(int(steps))
        ).run()


def group(members: float, pause: float) -> None:
    """Publish a group with a callback."""
    of_members = dramatiq.group(member.message(str(n), pause) for n in range(int(members)))
    of_members.add_completion_callback(done.message())
    of_members.run()


if __name__ == "__main__":
    main(worker=worker, chains=chains, group=group)
