"""Runs the specification on the recorded script calls of a real Redis, and compares every answer.

The order in which Redis walks over the keys of a consumer is taken from its answer. Features that the specification
does not cover (fair order, ordering keys, hung tasks) raise an error, so that they never count as a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from tests.model.answers import COUNTED, error_of, normal, plain
from tests.model.books import OVER, Flow, Name, Record, Terms
from tests.model.spec import Gone, Late, Publish, Retry, Spec
from tests.model.tracing import Call

_FLOWS = 6
"""number of limits that the specification covers; the remaining ones concern time and order"""


class Mismatch(AssertionError):
    """An answer of Redis differs from the specification's."""


class Replay(Spec):
    """The specified state of one partition; `take` applies one recorded call after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: dict[Name, bytes] = {}
        self.versions: dict[str, tuple[int, bytes]] = {}
        self.swept = self.armed = 0
        self.taken = 0
        self.compared = 0

    def take(self, call: Call) -> None:
        """Apply a recorded call. Raises `Mismatch` if Redis answered differently."""
        self.taken += 1
        error, answer = error_of(call.answer)
        if error.startswith("TQ RESET"):
            return
        self.now, self.real = call.now, call.real
        act: Callable[..., Any] | None = getattr(self, f"on_{call.name}", None)
        if act is None:
            return  # a script that changes nothing and returns nothing about tasks
        try:
            expected = act(list(call.words), answer)
        except Gone:
            expected, answer = "TQ GONE", error[:7]
        except Late:
            expected, answer = "TQ LATE", error[:7]
        else:
            if error:
                answer = error
        self.compared += 1
        expected, answer = plain(expected), plain(normal(call.name, answer))
        if expected != answer:
            raise Mismatch(f"call {self.taken}: {call}\n  told     {answer}\n  expected {expected}")

    def on_publish(self, words: list[bytes], _: Any) -> Any:
        """Publish tasks."""
        told: list[Any] = [0]
        while words:
            key, number = words[0].decode(), int(words[1])
            told[0] = max(told[0], self.terms_of(key).replicas)
            at = range(2, 2 + 3 * number, 3)
            answers = self.publish(key, [_published(words[n], words[n + 1]) for n in at])
            for n, answer in zip(at, answers, strict=True):
                if isinstance(answer, int) and answer >= 0:
                    self.bodies[key, words[n].decode()] = words[n + 2]
            told += answers
            del words[: 2 + 3 * number]
        return told

    def on_schedule_retry(self, words: list[bytes], _: Any) -> Any:
        """Schedule a retry."""
        key, task, at, name = words[0].decode(), words[1].decode(), int(words[2]), words[3].decode()
        known = self.tasks.get((key, task))
        ask = Retry(
            at, name, int(words[6] or 0), words[7].decode(), int(words[8]), words[9].hex(), int(words[10]),
            int(words[11] or 0),
        )  # fmt: skip
        answer = self.schedule_retry((key, task), ask)
        if answer == "accepted" and (known is None or known.state in OVER):
            self.bodies[key, task] = words[12]
        return [0 if answer == "lost" else self.terms_of(key).replicas, answer]

    def on_join(self, words: list[bytes], _: Any) -> Any:
        """Register a consumer."""
        token, worker, _, *keys = (word.decode() for word in words)
        self.join(token, worker, keys)
        return self.now

    def on_beat(self, words: list[bytes], _: Any) -> Any:
        """Record heartbeats of consumers."""
        return self.beat(word.decode() for word in words)

    def on_receive(self, words: list[bytes], answer: Any) -> Any:
        """Deliver tasks to a consumer."""
        token, turn, limit, look, *asked = (word.decode() for word in words)
        order: dict[str, None] = {}
        for key in _walked(answer) if answer else ():
            order.setdefault(key.decode())
        told = self.receive(
            token, int(turn), int(limit), look=look == "1", asked=asked, order=tuple(order)
        )
        return [
            self.now,
            told.due or "",
            int(told.again),
            sorted([key, task, attempt] for (key, task), attempt in told.expired),
            [[name[0], r.lane, *self.entry(name, r)] for name, r in told.given],
            sorted(told.left),
            sorted(told.others),
            sorted([key, at or ""] for key, at in told.closed),
        ]

    def entry(self, name: Name, r: Record) -> list[Any]:
        """Return a task's entry in the form in which a script delivers it."""
        return [r.fence, name[1], self.bodies[name], r.more]

    def on_pending(self, words: list[bytes], _: Any) -> Any:
        """List the deliveries that a consumer has in flight."""
        found = self.pending(words[0].decode(), int(words[1]))
        return sorted([name[0], r.lane, *self.entry(name, r), r.token] for name, r in found)

    def on_adopt(self, words: list[bytes], _: Any) -> Any:
        """Move deliveries to another consumer."""
        heir, told = words[0].decode(), list[Any]()
        if heir not in self.consumers:
            raise Gone
        for n in range(1, len(words), 4):
            key, lane, fence, token = (word.decode() for word in words[n : n + 4])
            name = self.held(key, lane, int(fence))
            r = name and self.adopt(heir, name, int(fence), token)
            told.append(self.entry(name, r)[1:] if name and r else [])
        return told

    def held(self, key: str, lane: str, fence: int) -> Name | None:
        """Return the name of the task that a receipt belongs to; None if it is not in flight."""
        found = (
            name for name, r in self.of(key) if r.owner and r.fence == fence and r.lane == lane
        )
        return next(found, None)

    def on_ack(self, words: list[bytes], _: Any) -> Any:
        """Ack deliveries."""
        told = []
        while words:
            key, _, token, known, number = (word.decode() for word in words[:5])
            for n in range(5, 5 + 3 * int(number), 3):
                name = key, words[n].decode()
                told.append(self.ack(name, int(words[n + 1]), token, known=known == "1"))
            del words[: 5 + 3 * int(number)]
        return told

    def on_redeliver(self, words: list[bytes], _: Any) -> Any:
        """Return deliveries to their queue."""
        loser, *rest = (word.decode() for word in words)
        return [
            self.redeliver((rest[n], rest[n + 1]), int(rest[n + 2]), rest[n + 3], loser)
            for n in range(0, len(rest), 4)
        ]

    def on_dead_letter(self, words: list[bytes], _: Any) -> Any:
        """Make a delivery's task a dead letter."""
        key, task, fence, token = (word.decode() for word in words[:4])
        return self.dead_letter((key, task), int(fence), token)

    def on_progress(self, words: list[bytes], _: Any) -> Any:
        """Record progress of a delivery."""
        key, task, fence, token = (word.decode() for word in words[:4])
        r = self.tasks.get((key, task))
        current = self.current(r, int(fence), token)
        if current and r is not None:
            self.put((key, task), r._replace(at=self.now))
        return int(current)

    def on_leave(self, words: list[bytes], _: Any) -> Any:
        """Take back a consumer's deliveries and remove the consumer."""
        assert self.leave(words[0].decode()) <= int(words[1])
        return 1

    def on_configure(self, words: list[bytes], _: Any) -> Any:
        """Replace the settings of a queue."""
        key, version, settings = words[0].decode(), int(words[1]), words[2]
        in_force, known = self.versions.get(key, (0, b""))
        if version != in_force:
            return "ok" if known == settings else in_force
        self.versions[key] = version + 1, settings
        numbers = [float(word) for word in words[12:]]
        if any(numbers[_FLOWS:]) or any(words[9:12]):
            raise Mismatch(f"queue {key} has settings that the specification does not know")
        terms = Terms(
            int(words[3]), int(words[5]), int(words[4]), int(words[8]), Flow(*numbers[:_FLOWS])
        )
        self.configure(key, terms)
        return "ok"

    def on_cancel(self, words: list[bytes], _: Any) -> Any:
        """Cancel a task."""
        return int(self.cancel((words[0].decode(), words[1].decode())))

    def on_redrive(self, words: list[bytes], _: Any) -> Any:
        """Redrive or discard dead letters."""
        key, discard, budget = words[0].decode(), words[1] == b"discard", int(words[3])
        upto = int(words[2] or self.last.get(key, 0))
        if not discard and self.due(key) <= self.now:
            self.promote(key)
        dead = sorted((r.due, name) for name, r in self.of(key) if r.state == "dead")
        names = [name for place, name in dead if place <= upto][:budget]
        over = len(names) < budget
        if words[4:]:
            names, over = [(key, word.decode()) for word in words[4:]], True
        moved = sum(self.redrive(name, discard=discard) for name in names)
        return [moved, int(over), upto]

    def on_purge(self, words: list[bytes], _: Any) -> Any:
        """Cancel the waiting and scheduled tasks of a queue."""
        key, budget = words[0].decode(), int(words[2])
        upto = int(words[1].split(b":")[0] or self.last.get(key, 0))
        open_ = [(r.rank, name) for name, r in self.of(key) if r.open and r.seq <= upto]
        later = [(r.due, r.seq, name) for name, r in self.of(key) if r.state == "scheduled"]
        names = [name for _, name in sorted(open_, key=_by_lane)][:budget]
        rest = sorted(later)[: budget - len(names)]
        names += [name for _, seq, name in rest if seq <= upto]
        purged = sum(self.cancel(name) for name in names)
        return [purged, int(purged < budget), upto]

    def on_delete(self, words: list[bytes], answer: Any) -> Any:
        """Delete a queue that is not in use. Whether an unused name is known to Redis is taken from its answer."""
        key = words[0].decode()
        uses = [self.count(key, name) for name in ("waiting", "scheduled", "in_flight", "dead")]
        uses.append(sum(key in consumer.keys for consumer in self.consumers.values()))
        if any(uses):
            return [answer[0], 0, 1, uses]
        old = [name for name, _ in self.of(key)]
        for name in old:
            del self.tasks[name], self.bodies[name]
        for table in (self.open, self.later, self.last, self.terms, self.versions):
            table.pop(key, None)
        for place in [place for place in self.counts if place[0] == key]:
            del self.counts[place]
        return [answer[0], len(old), 1, uses]

    def on_promote(self, words: list[bytes], _: Any) -> Any:
        """Make due tasks available."""
        promoted = self.promote_due(int(words[0]))
        return [promoted, _moment(self.first_due())]

    def on_maintain(self, words: list[bytes], _: Any) -> Any:
        """Run a pass of maintenance."""
        lease, period, budget = map(int, words[:3])
        if not self.swept or not self.armed or self.real - self.swept > 3 * period:
            self.armed = self.real
        self.swept = self.real
        promoted = self.promote_due(budget)
        expired = self.expire()
        given_up, recovered = [], 0
        for token in self.silent(lease) if self.real - self.armed > lease else ():
            given_up.append([token, self.consumers[token].worker])
            recovered += self.give_up(token)
        assert max(promoted, len(expired), recovered) < budget, "a pass took only a part"
        told = sorted([key, task, attempt] for (key, task), attempt in expired)
        figures = [promoted, told, self.forget(), recovered, "0"]
        return [*figures, sorted(given_up), self.unclaimed()]

    def unclaimed(self) -> list[str]:
        """Return the queues that have waiting tasks but no subscriber."""
        claimed = {key for consumer in self.consumers.values() for key in consumer.keys}
        keys = {name[0] for name in self.tasks} - claimed
        return sorted(key for key in keys if self.count(key, "waiting"))

    def forget(self) -> int:
        """Delete the records of tasks that ended longer ago than the queue's window; return their number."""
        old = [name for name, r in self.tasks.items() if self.forgettable(name[0], r)]
        for name in old:
            del self.tasks[name], self.bodies[name]
        return len(old)

    def on_stats(self, words: list[bytes], _: Any) -> Any:
        """Return the counters of a queue."""
        key = words[0].decode()
        oldest = min((r.seq for _, r in self.of(key) if r.open), default=0)
        subscribers = sum(key in consumer.keys for consumer in self.consumers.values())
        counters = [self.count(key, counter) for counter in COUNTED]
        return [counters, min(oldest, self.now) or "", subscribers]

    def on_status(self, words: list[bytes], _: Any) -> Any:
        """Return the full records of tasks."""
        key = words[0].decode()
        return [self.told_of(self.tasks.get((key, word.decode()))) for word in words[1:]]

    def told_of(self, r: Record | None) -> list[Any]:
        """Return a task's record in the form of the script's answer; empty if the task is unknown."""
        if r is None:
            return []
        place = "parked" if r.state == "dead" else r.place
        return [
            r.state, place, r.priority, r.attempt, r.losses, r.prior, r.handed, r.seq, r.fence, r.at, r.digest, r.verb,
            int(r.told == "dead"), r.settled, int(bool(r.owner)),
        ]  # fmt: skip

    def on_dead_letters(self, words: list[bytes], _: Any) -> Any:
        """List dead letters."""
        key = words[0].decode()
        dead = [
            name[1] for _, name in sorted((r.due, n) for n, r in self.of(key) if r.state == "dead")
        ]
        after = words[1].decode()
        if not int(words[2]):  # the caller asks for this dead letter only
            return [after] if after in dead else []
        start = dead.index(after) + 1 if after in dead else 0
        return dead[start : start + int(words[2])]


def replay(calls: Iterable[Call]) -> Replay:
    """Apply the calls to the specification, in order. Raises `Mismatch` at the first answer that differs."""
    model = Replay()
    for call in calls:
        model.take(call)
    return model


def _published(name: bytes, about: bytes) -> Publish:
    times, _, rest = about[9:].partition(b"/")
    if rest.partition(b"/")[2]:
        raise Mismatch("a task has an ordering key, of which the specification does not know")
    _, not_before, deadline = (times or b"::").split(b":")
    return Publish(
        name.decode(), about[:8].hex(), int(about[8:9]), int(not_before or 0), int(deadline or 0)
    )


def _walked(answer: Any) -> list[bytes]:
    """Return the keys in an order in which Redis may have visited them: keys without deliveries, then the others."""
    _, _, _, expired, groups, left, others, closed = answer
    gave = [group[0] for group in groups]
    idle = [told[0] for told in (*closed, *expired) if told[0] not in gave]
    return [*idle, *gave, *left, *others]


def _moment(time: float) -> Any:
    return int(time) if time < math.inf else ""


def _by_lane(one: tuple[tuple[int, bool, int], Name]) -> tuple[int, bool, int]:
    return one[0]
