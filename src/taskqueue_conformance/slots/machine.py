"""Random histories of a slot pool, compared with its model."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import msgspec
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    rule,
)

from taskqueue_conformance.harness import Harness
from taskqueue_conformance.histories import BackendMachine, play
from taskqueue_conformance.selection import needs
from taskqueue_conformance.slots.helpers import MODEL, OTHER_MODEL, check_pool
from taskqueue_conformance.slots.model import Held, SlotModel
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Endpoint, Permit, Seen, SlotLease

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


class SlotMachine(BackendMachine):
    """A state machine of dispatchers, an operator, servers and a clock.

    After each step, it compares the pool with the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = SlotModel(self.bench.now)
        self.given: list[SlotLease] = []
        self.fence = 0
        self.notes = 0

    @initialize(fields=st.tuples(*[_fields] * len(_ENDPOINTS)))
    def open(self, fields: tuple[dict[str, Any], ...]) -> None:
        """Register the endpoints, and report them as idle."""
        for (model, server), chosen in zip(_ENDPOINTS, fields, strict=True):
            self.register(model, server, chosen)
            self.reconcile(model, server, Seen(active=0), 0)

    @rule(
        endpoint=_endpoints,
        verb=st.sampled_from(["register", "drain", "take back", "remove", "rest", "end rest"]),
        fields=_fields,
    )
    def operate(self, endpoint: tuple[str, str], verb: str, fields: dict[str, Any]) -> None:
        """Change an endpoint in a random way."""
        model, server = endpoint
        if verb == "register":
            self.register(model, server, fields)
            self.reconcile(model, server, Seen(active=0), 0)
            return
        slots, pause = self.bench.slots, 3 * self.bench.short
        calls = {
            "drain": lambda: slots.drain(model, server),
            "take back": lambda: slots.drain(model, server, draining=False),
            "remove": lambda: slots.remove(model, server),
            "rest": lambda: slots.rest(model, server, pause),
            "end rest": lambda: slots.rest(model, server, 0),
        }
        answer = self.run(calls[verb]())
        position = self.model.endpoint(model, server)
        assert answer is (position is not None)
        if position is not None:
            if verb in ("drain", "take back"):
                position.draining = verb == "drain"
            elif verb in ("rest", "end rest"):
                position.rests_until = self.model.now + (pause if verb == "rest" else 0)
            if verb in ("drain", "remove", "rest"):
                self.model.clear(position)
            if verb == "remove":
                position.removed = True
                self.model.forget(position)
        self.check()

    def register(self, model: str, server: str, fields: dict[str, Any]) -> None:
        """Register or change an endpoint, and compare its state with the model."""
        made = Endpoint(model=model, server=server, url="http://x", **fields)
        endpoint = self.run(self.bench.slots.register(made))
        assert endpoint == self.model.expected_info(self.model.register(made))
        self.check()

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
        """Release some leases, and acquire slots of a model."""
        back, unit = self.latest(self.given, *releasing), self.bench.short
        patience = None if idle is None else idle * unit
        answer = self.run(
            self.bench.slots.acquire(
                model, holder, ttl=ttl * unit, limit=limit, releasing=back, idle=patience
            )
        )
        for lease in back:
            self.model.release(lease.token)
        expected = self.model.acquire(model, holder, ttl * unit, limit, patience)
        self.compare_leases(answer, expected, fresh=expected)

    @rule(model=_models, holder=_holders, jobs=st.lists(_jobs, min_size=1, max_size=2), ttl=_ttls)
    def start(self, model: str, holder: str, jobs: list[str], ttl: int) -> None:
        """Acquire slots, and bind them to jobs."""
        self.acquire(model=model, holder=holder, ttl=1, limit=len(jobs), releasing=[], idle=None)
        leases = [lease for lease in self.given[-len(jobs) :] if lease.state is Permit.UNASSIGNED]
        self.bind(list(zip(leases, jobs, strict=False)), ttl)

    @rule(indexes=_several, jobs=st.permutations(["job-1", "job-2", "job-3"]), ttl=_ttls)
    def assign(self, indexes: list[int], jobs: list[str], ttl: int) -> None:
        """Bind leases to jobs. The leases may be stale, and the jobs may already have slots."""
        self.bind(list(zip(self.latest(self.given, *indexes), jobs, strict=False)), ttl)

    def bind(self, pairs: list[tuple[SlotLease, str]], ttl: int) -> None:
        """Bind leases to jobs, with one call per job."""
        until = ttl * self.bench.short
        for shown, job in pairs:
            answer = self.run(self.bench.slots.assign((shown, job), ttl=until))
            expected, fresh = self.model.assign(shown, job, until)
            self.compare_leases(answer, [expected], fresh=[expected] if fresh else [])

    @rule(indexes=_several, ttl=_ttls)
    def detach(self, indexes: list[int], ttl: int) -> None:
        """Detach leases. They may be stale."""
        leases, until = self.latest(self.given, *indexes), ttl * self.bench.short
        answer = self.run(self.bench.slots.detach(*leases, ttl=until))
        self.compare_leases(answer, [self.model.detach(lease.token, until) for lease in leases])

    @rule(indexes=_several, ttl=_ttls)
    def renew(self, indexes: list[int], ttl: int) -> None:
        """Renew leases. They may be stale."""
        leases, until = self.latest(self.given, *indexes), ttl * self.bench.short
        answer = self.run(self.bench.slots.renew(*leases, ttl=until))
        expected = [self.model.renew(lease, until, lost=False)[0] for lease in leases]
        self.compare_leases(answer, expected)

    @rule(index=_places, job=st.none() | _jobs, ttl=_ttls)
    def renew_a_lost_one(self, index: int, job: str | None, ttl: int) -> None:
        """Renew a lease of a lost pool, and repeat the call, as a holder does after a lost answer."""
        for lease in self.latest(self.given, index) * 2:
            state = Permit.ASSIGNED if job else Permit.UNASSIGNED
            token = f"l0st.1.{job}".replace("-", "")
            lost = msgspec.structs.replace(lease, token=token, job=job, state=state)
            answer = self.run(self.bench.slots.renew(lost, ttl=ttl * self.bench.short))
            expected, fresh = self.model.renew(lost, ttl * self.bench.short, lost=True)
            self.compare_leases(answer, [expected], fresh=[expected] if fresh else [])

    @rule(indexes=_several)
    def release(self, indexes: list[int]) -> None:
        """Release leases. They may be stale."""
        leases = self.latest(self.given, *indexes)
        answer = self.run(self.bench.slots.release(*leases))
        assert answer == tuple(self.model.release(lease.token) for lease in leases)
        self.check()

    @rule(index=_places, job=_jobs)
    def leave(self, index: int, job: str) -> None:
        """Leave a note for a job, with the token of a lease. The token may be stale."""
        for lease in self.latest(self.given, index):
            self.notes += 1
            results = (lease.model, lease.job or job, lease.token, b"%d" % self.notes)
            assert self.run(self.bench.slots.leave(*results)) == self.model.leave(*results)
            self.check()

    @rule(endpoint=_endpoints, observed=_seen, other=st.none() | _seen, units=st.integers(0, 2))
    def looks(
        self, endpoint: tuple[str, str], observed: Seen, other: Seen | None, units: int
    ) -> None:
        """Report the same observation of a server twice and, in between, a different observation or no answer."""
        for observation in (observed, *(() if other == observed else (other,)), observed):
            self.reconcile(*endpoint, observation, 1)
            if units:
                self.advance(units)

    def reconcile(self, model: str, server: str, observed: Seen | None, settled: int) -> None:
        """Report an observation of a server; fail unless the leases that end are the same as in the model."""
        spacing = settled * self.bench.short
        ended = self.run(self.bench.slots.reconcile(model, server, observed, settled=spacing))
        position = self.model.endpoint(model, server)
        expected = [] if position is None else self.model.reconcile(position, observed, spacing)
        assert [lease.fence for lease in ended] == [lease.fence for lease in expected]
        self.check()

    @rule(units=st.integers(1, 3))
    def advance(self, units: int) -> None:
        """Advance the store's clock."""
        self.run(self.bench.advance(units * self.bench.short))
        self.check()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call, set the model's time to the store's time, and return the answer."""
        answer = self.runner.run(call)
        self.model.tick(self.bench.now)
        return answer

    def compare_leases(
        self,
        answer: Iterable[SlotLease | None],
        expected: Iterable[Held | None],
        *,
        fresh: Iterable[Held | None] = (),
    ) -> None:
        """Compare returned leases with those of the model. Leases in ``fresh`` must have new tokens."""
        new, answered, right = [id(item) for item in fresh], list(answer), list(expected)
        assert len(answered) == len(right), (
            f"wrong number of leases: expected {len(right)}, got {len(answered)}"
        )
        for lease, held in zip(answered, right, strict=True):
            assert (lease is None) == (held is None), f"wrong lease: expected {held}, got {lease}"
            if lease is None or held is None:
                continue
            if id(held) in new:
                assert lease.fence > self.fence, "the fence must increase"
                assert lease.token not in {lease.token for lease in self.given}, (
                    "a token was issued twice"
                )
                self.fence, held.fence, held.token = lease.fence, lease.fence, lease.token
            assert (lease.token, lease.note) == (held.token, held.note)
            assert _shape(lease) == _shape(held)
            self.given.append(lease)
        self.check()

    def check(self) -> None:
        """Compare the whole pool with the model."""
        view = self.run(self.bench.slots.inspect())
        check_pool(view)
        positions = sorted(self.model.places, key=lambda item: item.endpoint.model)
        assert list(view.endpoints) == [
            self.model.expected_info(position) for position in positions
        ]
        leases = sorted(self.model.leases, key=lambda item: item.fence)
        assert [_shape(lease) for lease in view.leases] == [_shape(lease) for lease in leases]
        for model, job in self.model.late:
            matches = self.run(self.bench.slots.late(model, job))
            assert list(matches) == self.model.late[model, job]
        note(f"# number of leases: {len(leases)}")


class SlotsMachineSuite(Harness, needs=(Capability.SLOTS,)):
    """Tests that random histories of a slot pool agree with the model."""

    @needs("manual_clock")
    def test_slot_machine(self) -> None:
        """Random histories of calls and reports break no promise of slots (B6, B8, C20, C22; faults H1, H4)."""
        play(SlotMachine, self, 40)


def _shape(lease: SlotLease | Held) -> tuple[object, ...]:
    results = (lease.model, lease.server, lease.holder, lease.state, lease.job, lease.fence)
    return (*results, round(lease.expires_at, 6), lease.switched, lease.resumed)
