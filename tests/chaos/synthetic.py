"""Valid histories made without a store, by a simulation of one queue, its clients and some faults."""

from __future__ import annotations

import math
import random
from typing import Any

from taskqueue_core.authoring.fair_order import PriorityFloor
from tests.chaos.history import Event, What
from tests.chaos.story import Dump, Known

WALL = 1_000_000.0
"""difference between the simulated store's clock and the monotonic clock, in seconds"""
_STATES = ("waiting", "scheduled", "in_flight", "done", "dead", "expired", "cancelled", "discarded")


class Simulation:
    """A simulated store with one queue, in which every call takes one millisecond, and the log of its clients."""

    def __init__(self, seed: int = 0, key: str = "q") -> None:
        """Create an empty store with an empty log."""
        self.random = random.Random(seed)
        self.key = key
        self.at = 100.0
        self.lag = 0.0
        """seconds by which the store's clock has fallen behind"""
        self.events: list[Event] = []
        self.tasks: dict[str, dict[str, Any]] = {}
        self.held: dict[str, tuple[str, str]] = {}
        """task and holder of each receipt that is still valid"""
        self.issued: dict[str, str] = {}
        """task of every receipt"""
        self.places = math.inf
        """maximum number of tasks in flight"""
        self.rate, self.burst = 0.0, math.inf
        self.paused = False
        self.fair = False
        self.floor = 0.0
        self.starves_between = False
        self._shares = PriorityFloor()
        self._spent: dict[tuple[int, str], float] = {}
        """turns used by each waiting tenant, by priority and tenant"""
        self._tokens, self._filled = math.inf, 0.0
        self._calls = 0
        self._receipts = 0
        self._places = 0.0

    def note(self, what: What, by: str, **fields: Any) -> Event:
        """Append an event, one millisecond after the previous one."""
        self.at += 0.001
        event = Event(at=self.at, by=by, what=what, **fields)
        self.events.append(event)
        return event

    def call(self) -> int:
        """Return a number that identifies a call."""
        self._calls += 1
        return self._calls

    @property
    def now(self) -> float:
        """The store's time."""
        return self.at + WALL - self.lag

    def publish(self, by: str, *ids: str, outcome: str = "accepted", **fields: Any) -> None:
        """Publish a batch. ``unconfirmed`` stores it but loses the answer; ``refused`` does not store it."""
        self._promote()  # tasks that were due before come first
        call = self.call()
        delay = fields.pop("delay", None)
        if delay is not None:
            fields["not_before"] = self.now + delay
        for task in ids:
            self.note(What.PUBLISH, by, call=call, key=self.key, task=task, payload="p", **fields)
        for task in ids:
            told = outcome
            if outcome in {"accepted", "unconfirmed"}:
                if task in self.tasks:
                    told = "duplicate" if outcome == "accepted" else outcome
                else:
                    self._add(task, fields)
            self.note(What.PUBLISHED, by, call=call, key=self.key, task=task, outcome=told)

    def _add(self, task: str, fields: dict[str, Any]) -> None:
        due = fields.get("not_before")
        self.tasks[task] = {
            "state": "waiting" if due is None else "scheduled",
            "due": due,
            "attempt": 1,
            "losses": 0,
            "place": (self._place(), 1),
            "priority": fields.get("priority", 5),
            "tenant": fields.get("tenant", ""),
            "ordering_key": fields.get("ordering_key", ""),
            "since": math.inf if due is not None else self._places,
        }

    def _place(self) -> float:
        self._places += 1
        return self._places

    def limit(self, places: float, rate: float, burst: float) -> None:
        """Set the in-flight limit and the rate limit; the token bucket starts full."""
        self.places, self.rate, self.burst = places, rate, burst
        self._tokens, self._filled = burst, self.now
        for name, value in (("limit", places), ("rate", rate), ("burst", burst)):
            self.note(What.SETTINGS, "op", key=self.key, name=name, value=value)

    def order(self, *, fair: bool = False, floor: float = 0.0) -> None:
        """Set fair order of tenants, and the floor share of each priority."""
        self.fair, self.floor = fair, floor
        for name, value in (("fair", float(fair)), ("floor", floor)):
            self.note(What.SETTINGS, "op", key=self.key, name=name, value=value or None)

    def pause(self) -> None:
        """Pause deliveries."""
        self.note(What.PAUSE, "op", key=self.key)
        self.paused = True
        self.note(What.PAUSED, "op", key=self.key, store_at=self.now)

    def resume(self) -> None:
        """Resume deliveries."""
        self.note(What.RESUME, "op", key=self.key)
        self.paused = False

    def _room(self) -> float:
        """Return how many tasks may be delivered now."""
        tokens = self._tokens + self.rate * (self.now - self._filled)
        self._tokens, self._filled = min(self.burst, tokens), self.now
        running = sum(one["state"] == "in_flight" for one in self.tasks.values())
        return 0 if self.paused else min(self.places - running, self._tokens)

    def receive(self, by: str, limit: int = 10) -> list[str]:
        """Deliver available tasks in order; return their receipts."""
        self._promote()
        chosen: list[str] = []
        for _ in range(int(max(0, min(limit, self._room())))):
            name = self._next()
            if name is None:
                break
            self.tasks[name]["state"] = "in_flight"
            chosen.append(name)
        self._tokens -= len(chosen)
        store_at = self.now
        self.note(What.RECEIVED, by, count=len(chosen))
        receipts = []
        for name in chosen:
            one = self.tasks[name]
            self._receipts += 1
            receipt = f"r{self._receipts}"
            self.held[receipt] = name, by
            self.issued[receipt] = name
            fields = {"attempt": one["attempt"], "losses": one["losses"]}
            self.note(
                What.DELIVERED, by, key=self.key, task=name, receipt=receipt, store_at=store_at,
                **fields,
            )  # fmt: skip
            receipts.append(receipt)
        return receipts

    def _next(self) -> str | None:
        """Return the task to deliver next, and count the turn."""
        lanes: dict[int, list[str]] = {}
        for name, one in self.tasks.items():
            if one["state"] == "waiting" and not self._behind(one):
                lanes.setdefault(one["priority"], []).append(name)
        if not lanes:
            return None
        priorities = sorted(lanes, reverse=True)
        priority = priorities[self._shares.next(self.floor, priorities)]
        self._shares.handed_out(self.floor, priorities)
        if self.starves_between and priority != priorities[0]:
            priority = priorities[-1]
        lane = sorted(lanes[priority], key=lambda name: self.tasks[name]["place"][::-1])
        return self._turn(priority, lane) if self.fair else lane[0]

    def _behind(self, one: dict[str, Any]) -> bool:
        """Return whether an earlier task with the same ordering key has not ended."""
        live = {"waiting", "scheduled", "in_flight"}
        return bool(one["ordering_key"]) and any(
            other["ordering_key"] == one["ordering_key"]
            and other["state"] in live
            and other["since"] < one["since"]
            for other in self.tasks.values()
        )

    def _turn(self, priority: int, lane: list[str]) -> str:
        """Return the first task of the tenant that has used the fewest turns."""
        heads = {self.tasks[name]["tenant"]: name for name in reversed(lane)}
        there = {t: n for (p, t), n in self._spent.items() if p == priority and t in heads}
        least = min(there.values(), default=0.0)
        for tenant in heads:
            there.setdefault(tenant, least + 1.0)
        self._spent = {pair: n for pair, n in self._spent.items() if pair[0] != priority}
        tenant = min(there, key=lambda one: there[one])
        there[tenant] += 1.0
        self._spent |= {(priority, one): spent for one, spent in there.items()}
        return heads[tenant]

    def settle(
        self,
        by: str,
        receipt: str,
        verb: str,
        *,
        task: str = "",
        delay: float = 0.05,
        lose: bool = False,
    ) -> None:
        """Settle a receipt, which may be stale; with ``lose`` the answer is lost."""
        held = self.held.get(receipt)
        task = self.issued[receipt]
        due = self.now + delay if verb == "retry" else None
        call = self.call()
        fields = {"call": call, "key": self.key, "task": task, "receipt": receipt, "verb": verb}
        self.note(What.SETTLE, by, due=due, **fields)
        outcome = "lease_lost"
        if held:
            del self.held[receipt]
            outcome = "ok"
            one = self.tasks[task]
            if verb == "ack":
                one["state"] = "done"
            elif verb == "dead_letter":
                one["state"] = "dead"
            elif verb == "redeliver":
                one.update(state="waiting", place=(self._place(), 0))
            elif verb == "retry":
                one.update(state="scheduled", due=due, attempt=one["attempt"] + 1, losses=0)
        self.note(What.SETTLED, by, outcome="unknown" if lose else outcome, **fields)

    def take_back(self, by: str) -> None:
        """Return the deliveries of a consumer that is gone, counted as lost."""
        for receipt, (task, holder) in list(self.held.items()):
            if holder == by:
                del self.held[receipt]
                one = self.tasks[task]
                one.update(state="waiting", losses=one["losses"] + 1, place=(self._place(), 0))

    def _promote(self) -> None:
        scheduled = [t for t in self.tasks.values() if t["state"] == "scheduled"]
        for one in sorted(scheduled, key=lambda t: t["due"]):
            if one["due"] <= self.now:
                one.update(state="waiting", place=(self._place(), 1))
                one["since"] = min(one["since"], self._places)

    def drain(self, by: str) -> None:
        """Deliver and ack until every task has ended."""
        while any(one["state"] in {"waiting", "scheduled"} for one in self.tasks.values()):
            for receipt in self.receive(by):
                self.settle(by, receipt, "ack")
            self.at += 0.01

    def dump(self) -> Dump:
        """Return the final state of the simulated store."""
        asked = dict.fromkeys(e.task for e in self.events if e.what is What.PUBLISH)
        tasks = {
            name: Known(one["state"], one["attempt"], one["losses"])
            for name, one in self.tasks.items()
        }
        states = [one.state for one in tasks.values()]
        ledger = {state: states.count(state) for state in _STATES} | {"published": len(tasks)}
        return Dump(
            tasks={self.key: {name: tasks.get(name) for name in asked}},
            ledgers={self.key: ledger},
            dead_letters={
                self.key: tuple(name for name, one in tasks.items() if one.state == "dead")
            },
        )


class RandomRun(Simulation):
    """A random valid run with limits: two producers, three consumers, lost answers, kills, freezes and pauses."""

    def __init__(self, seed: int, steps: int = 60) -> None:
        """Simulate the whole run."""
        super().__init__(seed)
        self.consumers = ["c1", "c2", "c3"]
        self.hands: dict[str, list[str]] = {name: [] for name in self.consumers}
        self.frozen = ""
        for name in ("p1", "p2", *self.consumers):
            self.note(What.STARTED, name, wall=WALL)
        self.note(What.PHASE, "world", name="load")
        self.limit(places=6.0, rate=60.0, burst=8.0)
        self.order(fair=seed % 3 == 0, floor=0.25 if seed % 4 == 0 else 0.0)
        moves = [self._publish, self._receive, self._settle, self._kill, self._freeze, self._thaw]
        moves += [self.pause, self.resume]
        for _ in range(steps):
            self.at += self.random.random() * 0.05
            self.random.choices(moves, (30, 30, 30, 3, 3, 4, 2, 6))[0]()
        self._thaw()
        self.resume()
        self.note(What.PHASE, "world", name="heal")
        for who in self.consumers:
            for receipt in self.hands[who]:
                self.settle(who, receipt, "ack")
        self.drain(self.consumers[0])
        self.note(What.PHASE, "world", name="done")

    def _someone(self) -> str:
        return self.random.choice([name for name in self.consumers if name != self.frozen])

    def _publish(self) -> None:
        ids = [f"t{self.call()}" for _ in range(self.random.randint(1, 4))]
        by = self.random.choice(["p1", "p2"])
        fields: dict[str, Any] = {"priority": self.random.choice([5, 5, 8])}
        if self.random.random() < 0.2:
            fields["delay"] = self.random.random()
        if self.random.random() < 0.5:
            fields["tenant"] = self.random.choice(["one", "two"])
        if self.random.random() < 0.2:
            fields["ordering_key"] = self.random.choice(["user", "other"])
        outcome = self.random.choice(["accepted"] * 8 + ["refused", "unconfirmed"])
        self.publish(by, *ids, outcome=outcome, **fields)
        if outcome == "unconfirmed" and self.random.random() < 0.7:
            fields.pop("delay", None)
            self.publish(by, *ids, **fields)

    def _receive(self) -> None:
        who = self._someone()
        self.hands[who] += self.receive(who, self.random.randint(1, 5))

    def _settle(self) -> None:
        who = self._someone()
        if self.hands[who]:
            verb = self.random.choice(["ack", "ack", "ack", "retry", "redeliver", "dead_letter"])
            self.settle(who, self.hands[who].pop(0), verb, lose=self.random.random() < 0.1)

    def _kill(self) -> None:
        who = self._someone()
        self.note(What.FAULT, "world", name="kill consumer", target=who)
        self.note(What.KILLED, "world", target=who)
        self.take_back(who)
        fresh = f"{who}'"
        self.consumers[self.consumers.index(who)] = fresh
        self.hands[fresh] = []
        self.note(What.STARTED, fresh, wall=WALL)

    def _freeze(self) -> None:
        if not self.frozen:
            self.frozen = self._someone()
            self.note(What.FAULT, "world", name="freeze consumer", target=self.frozen)
            self.note(What.FROZEN, "world", target=self.frozen)

    def _thaw(self) -> None:
        if self.frozen:
            self.at += 10.0
            self.take_back(self.frozen)
            self.note(What.THAWED, "world", target=self.frozen)
            self.frozen = ""
