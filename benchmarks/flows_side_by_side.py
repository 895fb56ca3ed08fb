"""Compare chains, groups and schedules with those of other libraries: ``python benchmarks/flows_side_by_side.py``.

Each library runs with two workers and a scheduler on a Redis of its own, and each handler leaves an effect in another
Redis. *Rates*: a chain, and a group with a callback, without a fault. *Faults*: a worker is killed (SIGKILL) once a
fifth of the effects are there, and started again; of schedules that are due in the same second of each minute, the
scheduler in the second minute, and a worker in the third. *Lost* are effects that never came, *doubled* are those that
came more than once. A handler that was killed while it ran is run again by each of the libraries, so a few doubled
steps are what they promise; a chain or a callback that is lost is not.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import environments
from processes import RedisServer

_QUIET = 45.0
"""seconds without an effect after which the missing ones count as lost; messages of dead workers come back earlier"""
_PAUSE = 0.01
"""seconds that a handler takes while workers are killed"""
_MINUTE = 60


@dataclass(frozen=True)
class System:
    """One library."""

    name: str
    environment: str
    does: Sequence[str]
    packages: Sequence[str]


SYSTEMS = (
    System("taskqueue", "taskqueue", ("chains", "group", "cron"), ("taskqueue-backends",)),
    System("celery", "celery", ("chains", "group", "cron"), ("celery",)),
    System("dramatiq", "dramatiq", ("chains", "group"), ("dramatiq",)),
    System("taskiq", "taskiq", ("cron",), ("taskiq", "taskiq-redis")),
)


class Stage:
    """The processes of one library, and the effects that its handlers have left."""

    def __init__(self, system: System, broker: RedisServer, effects: RedisServer) -> None:
        self._system = system
        self._urls = (broker.url, effects.url)
        self._ask = effects.ask
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, role: str, *arguments: float) -> None:
        """Play a role to its end."""
        assert self._start(role, *arguments).wait(300) == 0, role

    def start(self, name: str, *arguments: float) -> None:
        """Start a worker or a scheduler."""
        self._processes[name] = self._start(name.rstrip("0123456789"), *arguments)

    def _start(self, role: str, *arguments: float) -> subprocess.Popen[bytes]:
        python, variables = environments.python_of(self._system.environment)
        script = environments.ENTRIES / f"flow_{self._system.name}.py"
        words = [python, "-u", str(script), role, *self._urls, *map(str, arguments)]
        quiet: Any = None if "-v" in sys.argv else subprocess.DEVNULL
        return subprocess.Popen(
            words, env=variables, stdout=quiet, stderr=quiet, start_new_session=True
        )

    def kill(self, name: str, *arguments: float) -> None:
        """Kill a process with its children, and start it again."""
        self._end(self._processes[name])
        self.start(name, *arguments)

    def close(self) -> None:
        """Kill all processes."""
        for process in self._processes.values():
            self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def effects(self, start: int = 0) -> list[tuple[str, str, float]]:
        """Return the effects: kind, name and time."""
        found = [line.split() for line in self._ask("LRANGE", "effects", start, -1)]
        return [(kind, name, float(at)) for kind, name, at in found]

    def count(self) -> int:
        """Return the number of effects."""
        return int(self._ask("LLEN", "effects"))

    def clear(self) -> None:
        """Forget all effects."""
        self._ask("DEL", "effects")

    def until(self, number: int) -> None:
        """Wait for a number of effects, or until none comes any more."""
        last, since = -1, time.monotonic()
        while (count := self.count()) < number and time.monotonic() < since + _QUIET:
            if count != last:
                last, since = count, time.monotonic()
            time.sleep(0.005)


@contextmanager
def stage(system: System) -> Iterator[Stage]:
    """Run the two stores, and two workers."""
    with ExitStack() as stack:
        broker, effects = (stack.enter_context(RedisServer(durable=True)) for _ in range(2))
        found = Stage(system, broker, effects)
        stack.callback(found.close)
        for n in range(2):
            found.start(f"worker{n}")
        yield found


def rate(on: Stage, role: str, number: int) -> float:
    """Return the handlers per second of one chain, or of one group with its callback."""
    on.run(role, *((1, 10) if role == "chains" else (10,)), 0)  # the workers have started
    on.until(10 if role == "chains" else 11)
    on.clear()
    expected = number if role == "chains" else number + 1
    on.run(role, *((1, number) if role == "chains" else (number,)), 0)
    on.until(expected)
    times = [at for _, _, at in on.effects()]
    return len(times) / (max(times) - min(times)) if len(times) == expected else 0.0


def killed_worker(on: Stage, role: str, chains: int, number: int) -> str:
    """Return what became of chains, or of a group, while a worker was killed."""
    on.clear()
    expected = chains * number if role == "chains" else number + 1
    on.run(role, *((chains, number) if role == "chains" else (number,)), _PAUSE)
    on.until(expected // 5)
    on.kill("worker0")
    on.until(expected)
    time.sleep(_PAUSE * 10 + 15)  # what is delivered again comes within the lease
    counts = Counter((kind, name) for kind, name, _ in on.effects())
    doubled = sum(count - 1 for count in counts.values())
    if role == "chains":
        ended = sum(("step", f"{n}.{number - 1}") in counts for n in range(chains))
        return f"chains lost {chains - ended} of {chains}, steps doubled {doubled}"
    members = sum(kind == "member" for kind, _ in counts)
    callbacks = counts["callback", "0"]
    doubled -= max(0, callbacks - 1)
    return f"members lost {number - members}, doubled {doubled}; callback ran {callbacks} times"


def cron(on: Stage, number: int) -> list[str]:
    """Return what became of schedules that are due in the same second of three minutes."""
    if on._system.name == "taskqueue":  # noqa: SLF001 - it keeps the schedules in the store
        on.run("prepare", number)
    time.sleep(10 - min(10, _MINUTE - time.time() % _MINUTE))  # not just before a minute
    on.start("scheduler", number)
    first = int(time.time()) // _MINUTE + 1
    for minute, victim in enumerate(("", "scheduler", "worker0")):
        time.sleep(max(0.0, (first + minute) * _MINUTE - time.time()))
        if victim:
            on.until(on.count() + number // 5)
            on.kill(victim, *((number,) if victim == "scheduler" else ()))
        time.sleep(max(0.0, (first + minute) * _MINUTE + 50 - time.time()))
    counts: dict[int, Counter[str]] = {minute: Counter() for minute in range(3)}
    late = []
    for _, name, at in on.effects():
        minute = int(at) // _MINUTE - first
        if minute in counts:
            counts[minute][name] += 1
            if minute == 0:
                late.append(at % _MINUTE)
    late.sort()
    quantiles = (statistics.median(late), late[int(len(late) * 0.99) - 1]) if late else (0.0, 0.0)
    rows = [f"late p50 {quantiles[0] * 1000:.0f} ms, p99 {quantiles[1] * 1000:.0f} ms"]
    for minute, found in counts.items():
        what = ("no fault", "scheduler killed", "worker killed")[minute]
        doubled = sum(count - 1 for count in found.values())
        rows.append(f"{what}: lost {number - len(found)}, doubled {doubled}")
    return rows


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--what", nargs="+", default=["chains", "group", "cron"])
    parser.add_argument("--steps", type=int, default=1000, help="Length of the measured chain.")
    parser.add_argument("--members", type=int, default=999, help="Size of the group.")
    parser.add_argument(
        "--chains", type=int, default=50, help="Number of chains, of 20 steps each."
    )
    parser.add_argument("--schedules", type=int, default=1000, help="Number of schedules.")
    parser.add_argument("-v", action="store_true", help="Show what the processes print.")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes end, too
    for system in SYSTEMS:
        for what in [what for what in args.what if what in system.does]:
            if system.name not in args.only:
                continue
            with stage(system) as on:
                if what == "cron":
                    print(f"{system.name} cron: {'; '.join(cron(on, args.schedules))}", flush=True)
                    continue
                number = args.steps if what == "chains" else args.members
                speed = rate(on, what, number)
                size = 20 if what == "chains" else args.members
                fate = killed_worker(on, what, args.chains, size)
                print(f"{system.name} {what}: {speed:.0f} per second; {fate}", flush=True)


if __name__ == "__main__":
    main()
