"""Chains, chords and beat of Celery, on its Redis broker and result backend."""

from __future__ import annotations

import tempfile
from typing import Any

from celery import Celery, chain, chord
from celery.schedules import crontab
from flow import BROKER, EFFECTS, effect, main

VISIBLE = 10
"""seconds after which a message of a dead worker is delivered again; the default is an hour"""
app = Celery("flow", broker=BROKER, backend=BROKER)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    broker_transport_options={"visibility_timeout": VISIBLE},
    result_backend_transport_options={"visibility_timeout": VISIBLE},
    broker_connection_retry_on_startup=True,
)


@app.task
def step(name: str, pause: float) -> None:
    """Run one step of a chain."""
    effect("step", name, pause)


@app.task
def member(name: str, pause: float) -> None:
    """Run one member of a group."""
    effect("member", name, pause)


@app.task
def done(*_: Any) -> None:
    """Run once all members are done."""
    effect("callback", 0)


@app.task
def tick(name: str) -> None:
    """Run the task of a schedule."""
    effect("tick", name)


def worker() -> None:
    """Run a worker with two child processes."""
    app.worker_main(["worker", "--concurrency=2", "--loglevel=ERROR", "--without-mingle"])


def scheduler(number: float) -> None:
    """Run beat, with its schedule file."""
    app.conf.beat_schedule = {
        f"s{n}": {"task": tick.name, "schedule": crontab(), "args": (f"s{n}",)}
        for n in range(int(number))
    }
    app.Beat(schedule=f"{tempfile.gettempdir()}/beat", loglevel="ERROR").run()


def chains(number: float, steps: float, pause: float) -> None:
    """Publish chains."""
    for n in range(int(number)):
        chain(step.si(f"{n}.{m}", pause) for m in range(int(steps))).apply_async()


def group(members: float, pause: float) -> None:
    """Publish a group with a callback."""
    chord((member.si(str(n), pause) for n in range(int(members))), done.si()).apply_async()


if __name__ == "__main__":
    assert EFFECTS
    main(worker=worker, scheduler=scheduler, chains=chains, group=group)
