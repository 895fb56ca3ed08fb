"""Records of the calls of several leasers on one slot pool, and a check of the pool's rules (R16).

A process may die between a call and its answer, so the end of a lease is not known exactly. A lease certainly exists
from the time at which the store granted it, computed from its expiry, until the first call that may have ended it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

LEASE = 0.2
SETTLED = 0.06
IDLE = 0.05
TOGETHER = 8
"""number of jobs that the server ``both`` runs at once, over all its models"""
_CLOCK = 2e-6
"""seconds of tolerance for rounding errors of float times"""


class Place(NamedTuple):
    """An endpoint of the test: a model on a server."""

    model: str
    server: str
    slots: int
    reports: bool = True


PLACES = (
    Place("a-1", "one", 8),
    Place("a-1", "both", 6),
    Place("a-1", "mute", 6, reports=False),
    Place("b", "both", 6),
    Place("b", "two", 4),
)


class Held(msgspec.Struct, frozen=True):
    """A lease as it was returned to its holder."""

    fence: int
    model: str
    server: str
    job: str | None
    expires_at: float
    resumed: bool = False


class Call(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One call: recorded before it is sent, and again with its answer."""

    name: str
    what: str
    asked: float
    answered: float | None = None
    fences: list[int] = []
    """fences of the leases passed to the call"""
    jobs: list[str] = []
    """jobs to which the leases are to be assigned"""
    model: str = ""
    server: str = ""
    told: list[Held | None] = []
    released: list[bool] = []
    faults: list[str] = []
    silent: bool = False
    """whether the server gave no answer; then the pool ends its leases that have no job"""


class Figures(NamedTuple):
    """Result of a check."""

    granted: int
    broken: list[str]
    most: dict[tuple[str, str], int]
    """maximum number of slots that were certainly leased at the same time, by endpoint"""
    told: Counter[str]
    """number of answered calls and of ends, by kind"""


class _Life:
    """What is known about one lease."""

    def __init__(self, held: Held, start: float) -> None:
        self.held = held
        self.start = start
        self.bound: float | None = None
        """time at which it was assigned to a job; None if it was not"""
        self.end = math.inf
        self.causes: list[float] = []
        """times of the calls that may have ended it"""
        self.expires_at = held.expires_at

    def may_end(self, at: float) -> None:
        self.end = min(self.end, at)
        self.causes.append(at)


def read(logs: Iterable[Path]) -> list[Call]:
    """Return the calls of all processes, ordered by time. An incomplete last line of a killed process is skipped."""
    calls: dict[str, Call] = {}
    for log in logs:
        for line in log.read_bytes().split(b"\n"):
            try:
                call = msgspec.json.decode(line, type=Call)
            except msgspec.DecodeError:
                continue
            calls[call.name] = call
    return sorted(calls.values(), key=lambda call: call.asked)


def check(calls: list[Call], places: Iterable[Place] = PLACES) -> Figures:
    """Check the calls against all rules; return violations and figures."""
    lives = _lives(calls)
    _ends(calls, lives)
    by_place = {(place.model, place.server): place for place in places}
    for life in lives.values():
        place = by_place[life.held.model, life.held.server]
        if life.bound is None or not place.reports:
            life.may_end(life.expires_at)
        if life.bound is None:
            life.may_end(life.start + IDLE)
    most, broken = _at_once(lives, by_place)
    broken += [f"{call.what}: {fault}" for call in calls for fault in call.faults]
    broken += _fences(lives)
    broken += _stale(calls, lives)
    broken += _too_early(calls, lives)
    granted = sum(len(call.told) for call in calls if call.what == "acquire")
    return Figures(granted, broken, most, _counted(calls))


def _lives(calls: list[Call]) -> dict[int, _Life]:
    lives: dict[int, _Life] = {}
    for call in calls:
        if call.what not in {"acquire", "assign", "renew", "detach"}:
            continue
        for held in filter(None, call.told):
            life = lives.get(held.fence)
            if life is None:
                life = lives[held.fence] = _Life(held, held.expires_at - LEASE)
            life.expires_at = max(life.expires_at, held.expires_at)
            if held.job is not None and life.bound is None:
                life.bound = held.expires_at - LEASE
                life.held = held
    return lives


def _ends(calls: list[Call], lives: dict[int, _Life]) -> None:
    of_place: dict[tuple[str, str], list[_Life]] = defaultdict(list)
    of_job: dict[str | None, list[_Life]] = defaultdict(list)
    for life in lives.values():
        of_place[life.held.model, life.held.server].append(life)
        of_job[life.held.job].append(life)
    for call in calls:
        if call.what in {"acquire", "release"}:
            for fence in call.fences:
                lives[fence].may_end(call.asked)
        elif call.what == "assign":
            _taken_over(call, lives, of_job)
        elif call.what == "reconcile":
            ended = {held.fence for held in call.told if held is not None}
            for life in of_place[call.model, call.server]:
                unheard = call.answered is None and life.start <= call.asked
                unused = call.silent and life.bound is None and life.start <= (call.answered or 0)
                if unheard or unused or life.held.fence in ended:
                    life.may_end(call.asked)


def _taken_over(call: Call, lives: dict[int, _Life], of_job: dict[str | None, list[_Life]]) -> None:
    """Record ends of leases by an assign: it may resume another lease of the same job and release the one passed in."""
    for place, (fence, job) in enumerate(zip(call.fences, call.jobs, strict=True)):
        told = None if call.answered is None else call.told[place]
        if told is not None and not told.resumed:
            continue
        lives[fence].may_end(call.asked)
        # Models are not compared: an additional possible cause does no harm.
        for life in of_job[job]:
            if life.start < call.asked or (told is not None and life.held.fence < told.fence):
                life.may_end(call.asked)


def _at_once(
    lives: dict[int, _Life], places: dict[tuple[str, str], Place]
) -> tuple[dict[tuple[str, str], int], list[str]]:
    most: dict[tuple[str, str], int] = {}
    broken: list[str] = []
    for place in places.values():
        of_place = (
            life for life in lives.values()
            if (life.held.model, life.held.server) == (place.model, place.server)
        )  # fmt: skip
        most[place.model, place.server] = found = _overlap(of_place)
        if found > place.slots:
            broken.append(
                f"{found} of {place.slots} slots of {place.model} on {place.server} were held at once"
            )
    both = _overlap(life for life in lives.values() if life.held.server == "both")
    if both > TOGETHER:
        broken.append(f"a server was given {both} jobs at once, not {TOGETHER}")
    return most, broken


def _overlap(lives: Iterable[_Life]) -> int:
    steps = []
    for life in lives:
        if life.end - life.start > 2 * _CLOCK:
            steps += [(life.start + _CLOCK, 1), (life.end - _CLOCK, -1)]
    return max(itertools.accumulate((step for _, step in sorted(steps))), default=0)


def _fences(lives: dict[int, _Life]) -> Iterator[str]:
    """Yield violations of: fences grow with the store's time."""
    ordered = sorted(lives.items())
    latest = -math.inf
    for fence, life in ordered:
        if life.start < latest - _CLOCK:
            yield f"the fence {fence} is above that of a later lease"
        latest = max(latest, life.start)


def _stale(calls: list[Call], lives: dict[int, _Life]) -> Iterator[str]:
    """Yield violations of: stale tokens stay stale, slots are released once, no token becomes stale without cause."""
    over: dict[int, float] = {}
    for call in sorted(
        (one for one in calls if one.answered is not None), key=lambda one: one.answered or 0
    ):
        good = call.released or [held is not None for held in call.told]
        if call.what in {"reconcile", "look", "acquire"}:
            continue
        for fence, kept in zip(call.fences, good, strict=True):
            if kept and over.get(fence, math.inf) < call.asked:
                yield f"{call.what}: a stale token of {fence} was good"
            taken_over = call.what == "assign" and fence not in {h.fence for h in call.told if h}
            if not kept or call.what == "release" or taken_over:
                over[fence] = min(over.get(fence, math.inf), call.answered or math.inf)
            mine = {"release": 1}.get(call.what, 0)
            causes = [at for at in lives[fence].causes if at <= (call.answered or 0)]
            if not kept and len(causes) <= mine:
                yield f"{call.what}: {fence} was lost without a cause"


def _too_early(calls: list[Call], lives: dict[int, _Life]) -> Iterator[str]:
    """Yield leases with a job that were ended too soon, before two observations of the server without the job."""
    for call in calls:
        for held in filter(None, call.told if call.what == "reconcile" else []):
            life = lives.get(held.fence)
            known = life and life.bound
            if known and (call.answered or 0) - known < SETTLED:
                yield f"the lease of {held.job} ended {(call.answered or 0) - known:.3f} s after it began"


def _counted(calls: list[Call]) -> Counter[str]:
    told: Counter[str] = Counter()
    for call in calls:
        told[call.what if call.answered is not None else "unanswered"] += 1
        told["resumed"] += sum(held.resumed for held in call.told if held and call.what == "assign")
        told["ended"] += len(call.told) if call.what == "reconcile" else 0
        told["stale"] += call.told.count(None) + call.released.count(False)
    return told
