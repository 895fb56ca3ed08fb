"""The Redis backend, minimal queues and other libraries, measured in turn in one run, and their scaling."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import catalog
import environments
import meter
import processes
import scaling
import tables
import versus


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The extent of a run."""

    rounds: int
    seconds: float
    """time limit in seconds; no round is started that would probably exceed it"""
    sizes: versus.Sizes
    patience: tuple[float, float]
    """maximum seconds to wait for an undisturbed machine, before one measurement and in total"""
    repeats: int
    """number of measurements for each combination of keys and backlog"""
    depths: tuple[int, ...]
    memory: int
    """number of tasks in the measurement of memory"""
    idle: float
    """duration in seconds of the measurement of idle workers"""
    of_all: bool = False
    """whether memory and idle workers are measured for all entries, not only for this project and the minimal queue"""


_NO_BOUND = 86_400.0
QUICK = Plan(
    rounds=1,
    seconds=60.0,
    sizes=versus.Sizes(single=500, scale=0.2, latency=200),
    patience=(0.3, 5.0),
    repeats=1,
    depths=(1_000, 20_000),
    memory=10_000,
    idle=2.0,
)
USUAL = Plan(
    rounds=3,
    seconds=220.0,
    sizes=versus.Sizes(),
    patience=(3.0, 60.0),
    repeats=3,
    depths=(1_000, 100_000),
    memory=20_000,
    idle=5.0,
)
FULL = Plan(
    rounds=7,
    seconds=_NO_BOUND,
    sizes=versus.Sizes(single=5_000, scale=3.0, latency=1_000),
    patience=(30.0, 1800.0),
    repeats=7,
    depths=(1_000, 100_000, 1_000_000),
    memory=100_000,
    idle=5.0,
    of_all=True,
)


def chosen(names: Sequence[str] | None, *, peers: bool) -> list[catalog.Entry]:
    """Return the entries with the given names; without names those of this project, with or without other libraries."""
    if names:
        return [entry for entry in catalog.ALL if entry.name in names]
    return [entry for entry in catalog.ALL if peers or entry.kind != "peer"]


def measure(
    entries: Sequence[catalog.Entry],
    plan: Plan,
    *,
    seed: int,
    rounds: int | None = None,
    durable: bool = False,
) -> dict[str, Any]:
    """Run the measurements of a plan, and return all figures for the result file."""
    start = time.monotonic()
    if rounds:
        plan = replace(plan, rounds=rounds, seconds=_NO_BOUND)
    order = random.Random(seed)
    able = _able(entries)
    turns: list[versus.Turn] = []
    patience = meter.Patience(*plan.patience)
    done, began = 0, time.monotonic()
    for number in range(1, plan.rounds + 1):
        if done and (time.monotonic() - began) / done * number > plan.seconds:
            _say(f"no time for round {number}")
            break
        shuffled = list(able)
        order.shuffle(shuffled)
        for entry in shuffled:
            _say(f"round {number} of {plan.rounds}: {entry.name}")
            turn = versus.turn(entry, plan.sizes, patience=patience, durable=durable)
            turns.append(turn)
            if turn.invalid:
                _say(f"INVALID {entry.name}: {turn.invalid}")
        done = number
    found = [asdict(turn) for turn in turns]
    return {
        "seed": seed,
        "durable": durable,
        "pinned": processes.cores() is not None,
        "plan": asdict(plan),
        "rounds": done,
        "entries": [{**asdict(entry), "compare": sorted(entry.compare)} for entry in entries],
        "absent": [entry.name for entry in entries if entry not in able],
        "versions": {turn.entry: turn.versions for turn in turns if turn.versions},
        "summary": tables.rows(tables.summarize(found)),
        "scaling": {} if durable else _scaling(able, plan, patience),
        "turns": found,
        "seconds": time.monotonic() - start,
    }


def _able(entries: Sequence[catalog.Entry]) -> list[catalog.Entry]:
    able = []
    for entry in entries:
        try:
            environments.python_of(entry.environment)
        except (environments.NotMade, OSError) as error:
            _say(f"{entry.name} is left out: its environment cannot be made: {error}")
        else:
            able.append(entry)
    return able


def _scaling(
    entries: Sequence[catalog.Entry], plan: Plan, patience: meter.Patience
) -> dict[str, Any]:
    by_name = {entry.name: entry for entry in entries}
    main = [by_name[name] for name in (catalog.OURS[0].name, tables.BASE) if name in by_name]
    if plan.of_all:
        one_each = {
            (entry.program, entry.mode if entry.kind == "peer" else ""): entry
            for entry in reversed(entries)
        }
        at_rest = list(one_each.values())
    else:
        at_rest = main
    kinds = ("keys", "limits", "backlog", "memory", "idle", "failed")
    found: dict[str, Any] = {kind: {} for kind in kinds}

    def look(what: str, entry: catalog.Entry, do: Callable[[], Any]) -> None:
        _say(f"{what}: {entry.name}")
        try:
            found[what][entry.name] = do()
        except Exception as error:  # noqa: BLE001 - the other entries continue, and the table reports the failure
            found["failed"][f"{what}: {entry.name}"] = f"{type(error).__name__}: {error}"
            _say(f"INVALID {what} of {entry.name}: {error}")

    repeated: dict[str, Any] = {"repeats": plan.repeats, "patience": patience}
    for entry in main:
        if entry.kind == "ours":
            look("keys", entry, partial(scaling.keys, entry, **repeated))
            look("limits", entry, partial(scaling.limits, entry, **repeated))
        look("backlog", entry, partial(scaling.backlog, entry, plan.depths, **repeated))
    for entry in at_rest:
        look("memory", entry, partial(scaling.memory, entry, plan.memory))
    for entry in at_rest:
        look("idle", entry, partial(scaling.idle, entry, plan.idle))
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
