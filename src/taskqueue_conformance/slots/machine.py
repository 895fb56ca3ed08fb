"""Random histories of a pool of slots, held against its model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, ClassVar, TypeVar

import msgspec
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from taskqueue_conformance.applying import needs
from taskqueue_conformance.bench import Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.slots.helpers import MODEL, OTHER_MODEL, check_pool
from taskqueue_conformance.slots.model import Held, SlotModel
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Endpoint, Permit, Seen, SlotLease

__all__ = ["SlotMachine", "SlotsMachineSuite"]

T = TypeVar("T")

_ENDPOINTS = ((MODEL, "s1"), (MODEL, "s-2"), (OTHER_MODEL, "s1"))
_endpoints = st.sampled_from([*_ENDPOINTS, _ENDPOINTS[0]])
_models = st.sampled_from([MODEL, MODEL, MODEL, OTHER_MODEL])
_holders = st.sampled_from(["h1", "h2"])
_jobs = st.sampled_from(["job-1", "job-2", "job-3", "job-4"])
_ttls = st.sampled_from([1, 3, 100])
_places = st.integers(0, 5)
_several = st.lists(_places, min_size=1, max_size=3, unique=True)
_fields = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 3),
        "priority": st.sampled_from([5, 5, 6]),
        "reports": st.sampled_from([True, True, True, False]),
        "together": st.sampled_from([None, None, 2, 3]),
    }
)
_seen = st.builds(
    Seen,
    active=st.sampled_from([0, 0, 1, 2]),
    jobs=st.none() | st.frozensets(_jobs, max_size=3),
)


class SlotMachine(RuleBasedStateMachine):
    """Dispatchers, an operator, servers and time. After each step the pool must look as the model does."""

    harness: ClassVar[Harness]

    def __init__(self) -> None:
        """Open an event loop of its own."""
        super().__init__()
        self.runner = asyncio.Runner()
        self.opened = Bench.opened(self.harness)
        self.bench: Bench = self.runner.run(self.opened.__aenter__())
        self.model = SlotModel(self.bench.now)
        self.given: list[SlotLease] = []
        self.fence = 0
        self.notes = 0

    def teardown(self) -> None:
        """Close the backend and the loop."""
        try:
            self.runner.run(self.opened.__aexit__(None, None, None))
        finally:
            self.runner.close()

    # the operator

    @initialize(fields=st.tuples(*[_fields] * len(_ENDPOINTS)))
    def open(self, fields: tuple[dict[str, Any], ...]) -> None:
        """Register endpoints, and find them idle."""
        for (model, server), chosen in zip(_ENDPOINTS, fields, strict=True):
            self.register(model, server, chosen)
            self.reconcile(model, server, Seen(active=0), 0)

    @rule(
        endpoint=_endpoints,
        verb=st.sampled_from(["register", "drain", "take back", "remove", "rest", "end rest"]),
        fields=_fields,
    )
    def operate(self, endpoint: tuple[str, str], verb: str, fields: dict[str, Any]) -> None:
        """Change an endpoint."""
        model, server = endpoint
        if verb == "register":
            self.register(model, server, fields)
            self.reconcile(model, server, Seen(active=0), 0)
        elif verb == "remove":
            self.remove(model, server)
        elif verb in ("rest", "end rest"):
            self.rest(model, server, 3 if verb == "rest" else 0)
        else:
            self.drain(model, server, draining=verb == "drain")

    def register(self, model: str, server: str, fields: dict[str, Any]) -> None:
        """Register an endpoint, or change it."""
        made = Endpoint(model=model, server=server, url="http://x", **fields)
        told = self.run(self.bench.slots.register(made))
        assert told == self.model.told(self.model.register(made))
        self.check()

    def drain(self, model: str, server: str, *, draining: bool) -> None:
        """Drain an endpoint, or take it back."""
        answer = self.run(self.bench.slots.drain(model, server, draining=draining))
        place = self.model.place(model, server)
        assert answer is (place is not None)
        if place is not None:
            place.draining = draining
            if draining:
                self.model.clear(place)
        self.check()

    def remove(self, model: str, server: str) -> None:
        """Remove an endpoint."""
        answer = self.run(self.bench.slots.remove(model, server))
        place = self.model.place(model, server)
        assert answer is (place is not None)
        if place is not None:
            self.model.clear(place)
            place.removed = True
            self.model.forget(place)
        self.check()

    def rest(self, model: str, server: str, units: int) -> None:
        """Have an endpoint rest."""
        answer = self.run(self.bench.slots.rest(model, server, units * self.bench.short))
        place = self.model.place(model, server)
        assert answer is (place is not None)
        if place is not None:
            place.rests_until = self.model.now + units * self.bench.short
            if units:
                self.model.clear(place)
        self.check()

    # dispatchers

    @rule(
        model=_models,
        holder=_holders,
        ttl=_ttls,
        limit=st.integers(0, 4),
        releasing=st.lists(_places, max_size=2),
        idle=st.none() | st.integers(0, 2),
    )
    def acquire(
        self,
        *,
        model: str,
        holder: str,
        ttl: int,
        limit: int,
        releasing: list[int],
        idle: int | None,
    ) -> None:
        """Take slots, and give some back for them."""
        back, unit = self.chosen(*releasing), self.bench.short
        patience = None if idle is None else idle * unit
        answer = self.run(
            self.bench.slots.acquire(
                model, holder, ttl=ttl * unit, limit=limit, releasing=back, idle=patience
            )
        )
        for lease in back:
            self.model.release(lease.token)
        expected = self.model.acquire(model, holder, ttl * unit, limit, patience)
        self.judge(answer, expected, fresh=expected)

    @rule(model=_models, holder=_holders, jobs=st.lists(_jobs, min_size=1, max_size=2), ttl=_ttls)
    def start(self, model: str, holder: str, jobs: list[str], ttl: int) -> None:
        """Take slots for jobs."""
        self.acquire(model=model, holder=holder, ttl=1, limit=len(jobs), releasing=[], idle=None)
        mine = [one for one in self.given[-len(jobs) :] if one.state is Permit.UNASSIGNED]
        self.bind(list(zip(mine, jobs, strict=False)), ttl)

    @rule(places=_several, jobs=st.permutations(["job-1", "job-2", "job-3"]), ttl=_ttls)
    def assign(self, places: list[int], jobs: list[str], ttl: int) -> None:
        """Bind leases to jobs, good or not, some of which may have a slot."""
        self.bind(list(zip(self.chosen(*places), jobs, strict=False)), ttl)

    def bind(self, pairs: list[tuple[SlotLease, str]], ttl: int) -> None:
        """Bind leases to jobs, one after another."""
        until = ttl * self.bench.short
        for shown, job in pairs:
            answer = self.run(self.bench.slots.assign((shown, job), ttl=until))
            expected, fresh = self.model.assign(shown, job, until)
            self.judge(answer, [expected], fresh=[expected] if fresh else [])

    @rule(places=_several, ttl=_ttls)
    def detach(self, places: list[int], ttl: int) -> None:
        """Detach leases."""
        leases, until = self.chosen(*places), ttl * self.bench.short
        answer = self.run(self.bench.slots.detach(*leases, ttl=until))
        self.judge(answer, [self.model.detach(one.token, until) for one in leases])

    @rule(places=_several, ttl=_ttls)
    def renew(self, places: list[int], ttl: int) -> None:
        """Renew leases."""
        leases, until = self.chosen(*places), ttl * self.bench.short
        answer = self.run(self.bench.slots.renew(*leases, ttl=until))
        expected = [self.model.renew(one, until, lost=False)[0] for one in leases]
        self.judge(answer, expected)

    @rule(place=_places, job=st.none() | _jobs, ttl=_ttls)
    def renew_a_lost_one(self, place: int, job: str | None, ttl: int) -> None:
        """Renew a lease of a pool that is no more, twice."""
        for lease in self.chosen(place) * 2:
            state = Permit.ASSIGNED if job else Permit.UNASSIGNED
            token = f"l0st.1.{job}".replace("-", "")
            lost = msgspec.structs.replace(lease, token=token, job=job, state=state)
            answer = self.run(self.bench.slots.renew(lost, ttl=ttl * self.bench.short))
            expected, fresh = self.model.renew(lost, ttl * self.bench.short, lost=True)
            self.judge(answer, [expected], fresh=[expected] if fresh else [])

    @rule(places=_several)
    def release(self, places: list[int]) -> None:
        """Release leases, good or not."""
        leases = self.chosen(*places)
        answer = self.run(self.bench.slots.release(*leases))
        assert answer == tuple(self.model.release(one.token) for one in leases)
        self.check()

    # servers

    @rule(place=_places, job=_jobs)
    def leave(self, place: int, job: str) -> None:
        """Leave a note for a job, by its token or another one."""
        for lease in self.chosen(place):
            self.notes += 1
            told = (lease.model, lease.job or job, lease.token, b"%d" % self.notes)
            assert self.run(self.bench.slots.leave(*told)) == self.model.leave(*told)
            self.check()

    @rule(endpoint=_endpoints, seen=_seen, other=st.none() | _seen, units=st.integers(0, 2))
    def looks(self, endpoint: tuple[str, str], seen: Seen, other: Seen | None, units: int) -> None:
        """Tell what a server said, twice, and what it did not say or said otherwise between."""
        for told in (seen, *(() if other == seen else (other,)), seen):
            self.reconcile(*endpoint, told, 1)
            if units:
                self.advance(units)

    def reconcile(self, model: str, server: str, seen: Seen | None, settled: int) -> None:
        """Tell what a server said."""
        spacing = settled * self.bench.short
        ended = self.run(self.bench.slots.reconcile(model, server, seen, settled=spacing))
        place = self.model.place(model, server)
        expected = [] if place is None else self.model.reconcile(place, seen, spacing)
        assert [one.fence for one in ended] == [one.fence for one in expected]
        self.check()

    @rule(units=st.integers(1, 3))
    def advance(self, units: int) -> None:
        """Let time pass."""
        self.run(self.bench.advance(units * self.bench.short))
        self.check()

    # what the rules are made of

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Return what a call answers, with the model at its time."""
        answer = self.runner.run(call)
        self.model.tick(self.bench.now)
        return answer

    def chosen(self, *places: int) -> list[SlotLease]:
        """Return leases that were given, the last ones first, good or not."""
        count = len(self.given)
        return [self.given[-1 - place % count] for place in places] if count else []

    def judge(
        self,
        answer: Iterable[SlotLease | None],
        expected: Iterable[Held | None],
        *,
        fresh: Iterable[Held | None] = (),
    ) -> None:
        """Compare leases with the model's; those that are ``fresh`` have new tokens."""
        new, answered, right = [id(one) for one in fresh], list(answer), list(expected)
        assert len(answered) == len(right), f"{len(answered)} leases, it must be {len(right)}"
        for told, held in zip(answered, right, strict=True):
            assert (told is None) == (held is None), f"answered {told}, it must be {held}"
            if told is None or held is None:
                continue
            if id(held) in new:
                assert told.fence > self.fence, "the fence does not rise"
                assert told.token not in {one.token for one in self.given}, "a token comes twice"
                self.fence, held.fence, held.token = told.fence, told.fence, told.token
            assert (told.token, told.note) == (held.token, held.note)
            assert _shape(told) == _shape(held)
            self.given.append(told)
        self.check()

    def check(self) -> None:
        """Compare the whole pool with the model."""
        view = self.run(self.bench.slots.look())
        check_pool(view)
        places = sorted(self.model.places, key=lambda one: one.endpoint.model)
        assert list(view.endpoints) == [self.model.told(place) for place in places]
        leases = sorted(self.model.leases, key=lambda one: one.fence)
        assert [_shape(one) for one in view.leases] == [_shape(one) for one in leases]
        for model, job in self.model.late:
            found = self.run(self.bench.slots.late(model, job))
            assert list(found) == self.model.late[model, job]
        note(f"# {len(leases)} held")


class SlotsMachineSuite(Harness, needs=(Capability.SLOTS,)):
    """Random histories against the model."""

    @needs("manual_clock")
    def test_slot_machine(self) -> None:
        """No history of calls, of what servers say and of time breaks a promise (B6, B8, C20, C22; faults H1, H4)."""
        machine = type("Machine", (SlotMachine,), {"harness": self})
        chosen = settings(
            max_examples=self.max_examples,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(machine, settings=chosen)


def _shape(lease: SlotLease | Held) -> tuple[object, ...]:
    told = (lease.model, lease.server, lease.holder, lease.state, lease.job, lease.fence)
    return (*told, round(lease.expires_at, 6), lease.switched, lease.resumed)
