"""The specification of the Redis backend's scripts: one method per script that changes state, with its answer.

It is used in two ways: `explore` visits every state of a small world, and `replay` runs it on the recorded calls of a
real Redis. The module `broken` contains versions with mistakes, to test that mistakes are found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.model.books import OVER, Consumer, Name, Record
from tests.model.terms import Terms
from tests.model.unique import Publish, Unique, UniqueKeys

_TOKENS = 100
"""number of retry tokens that a task keeps"""
_PROMOTED = 500
"""maximum number of due tasks that a publish makes available first"""


_LATE = 250_000
"""microseconds after which a receive counts as a heartbeat"""


class Retry(NamedTuple):
    """Arguments of a retry. ``fence`` and ``token`` identify the delivery that it settles, if any."""

    at: int
    name: str = ""
    fence: int = 0
    token: str = ""
    attempt: int = 0
    digest: str = ""
    priority: int = 5
    deadline: int = 0
    free: bool = False
    unique: Unique | None = None
    batch: str = ""
    tenant: str = ""
    tags: tuple[str, ...] = ()


class Spec(UniqueKeys):
    """The specified behaviour of the scripts; each method is one atomic step."""

    def publish(self, key: str, tasks: Sequence[Publish]) -> list[int | str]:
        """Store tasks, each once.

        Answers: number of tasks waiting before it, -1 (duplicate), -2 (conflict), or a refusal.
        """
        if self.due(key) <= self.now:
            self.promote(key, max(0, _PROMOTED - self.promoted))
        return [self.publish_one(key, task) for task in tasks]

    def publish_one(self, key: str, task: Publish) -> int | str:
        """Store one task, unless its id is known or the queue refuses it."""
        name = key, task.id
        known = self.tasks.get(name)
        if known is not None and not self.forgettable(key, known):
            if known.digest != task.digest:
                return -2
            return f"replaced:{known.instead}" if known.instead else -1
        if why := self.refuse_rare(name, task):
            return why
        if met := self.decide(key, task):
            return met
        if why := self.refusal(key):
            return why
        answer = self.count(key, "waiting")
        record = Record(digest=task.digest, priority=task.priority, deadline=task.deadline)
        unique = task.unique and task.unique.held(self.now)
        record = record._replace(unique=unique, tenant=task.tenant)
        at = task.due(self.now, self.now)
        if task.after or task.batch:
            self.publish_rare(name, record, task, at)
        elif at > self.now:
            self.schedule(name, record, at)
        else:
            self.make_available(name, record)
        if task.tags:
            self.tag(name, task.tags)
        self.add(key, "fresh", 1)
        self.add(key, "published", 1)
        return answer

    def refuse_rare(self, name: Name, task: Publish) -> str:  # noqa: ARG002 - for the subclass that knows batches
        """Return why a task with rare fields is refused; empty if it is accepted."""
        return ""

    def publish_rare(self, name: Name, record: Record, task: Publish, at: int) -> None:
        """Store a task that waits for others or has a batch. The small models have none."""
        raise NotImplementedError

    def forgettable(self, key: str, record: Record) -> bool:
        """Return whether a task ended longer ago than the queue's window, so that its id may be used again."""
        return record.state in OVER and self.now >= record.at + self.terms_of(key).window

    def schedule_retry(self, name: Name, ask: Retry) -> str:
        """Schedule the next attempt of a task, once per token."""
        key = name[0]
        r = self.tasks.get(name)
        token = ask.name or f"attempt:{self.attempt_of(r, ask)}"
        if r is not None and any(token == known for known, _ in r.retries):
            return "duplicate"
        if ask.fence and not self.current(r, ask.fence, ask.token):
            return "lost"
        is_new = r is None or r.state in OVER
        if r is not None and r.live:
            if ask.fence:
                r = r._replace(verb="retry", told="ok", settled=r.fence)
            r = self.withdraw(name, r)
        elif r is not None and r.state == "dead":
            self.add(key, "dead", -1)
            r = r._replace(prior=r.attempt, worker="")
        else:
            self.add(key, "published", 1)
            r = (r or Record())._replace(
                digest=ask.digest,
                priority=ask.priority,
                deadline=ask.deadline,
                unique=ask.unique and ask.unique.held(self.now),
                instead="",
                tenant=ask.tenant,
                worker="",
            )
        kept = {(known, at) for known, at in r.retries if at > r.attempt - _TOKENS}
        kept.add((token, r.attempt))
        uncounted = ask.free and r.state != "dead"
        r = r._replace(
            attempt=r.attempt + 1,
            losses=0,
            prior=r.prior + uncounted,
            retries=frozenset(kept),
        )
        self.schedule(name, r, ask.at)
        if is_new and (ask.tags or r.tags):
            self.tag(name, ask.tags)
        self.add(key, "retried", 1)
        return "accepted"

    def attempt_of(self, r: Record | None, ask: Retry) -> int:
        """Return the attempt that precedes a retry which has no token."""
        if ask.fence:
            return ask.attempt
        if r is None:
            return 0
        return r.attempt if r.owner else r.handed

    def join(self, token: str, worker: str, keys: Iterable[str]) -> None:
        """Register a consumer."""
        known = self.consumers.get(token) or Consumer(worker, tuple(keys))
        self.consumers[token] = known._replace(beat=self.real)

    def sign_of_life(self, token: str) -> None:
        """Take a receive for a heartbeat if the last one was long ago."""
        consumer = self.consumers[token]
        if self.real - consumer.beat > _LATE:
            self.consumers[token] = consumer._replace(beat=self.real)

    def beat(self, tokens: Iterable[str]) -> list[str]:
        """Record heartbeats of consumers; return the tokens of those that are no longer registered."""
        gone = []
        for token in tokens:
            if token in self.consumers:
                self.consumers[token] = self.consumers[token]._replace(beat=self.real)
            else:
                gone.append(token)
        return gone

    def pending(self, token: str, turn: int) -> list[tuple[Name, Record]]:
        """List a consumer's deliveries; receives of an earlier turn are refused from now on."""
        consumer = self.attending(token, sys.maxsize)
        self.consumers[token] = consumer._replace(turn=max(turn, consumer.turn))
        return [(name, r) for name, r in self.tasks.items() if r.owner == token]

    def adopt(self, heir: str, name: Name, fence: int, token: str) -> Record | None:
        """Move a delivery to another consumer of the same worker; its receipt stays valid."""
        r = self.tasks.get(name)
        if not self.current(r, fence, token):
            return None
        assert r is not None
        if self.consumers[r.owner].worker != self.consumers[heir].worker:
            return None
        self.read += self.size(name)
        self.put(name, r._replace(owner=heir, token=token))
        return self.tasks[name]

    def current(self, r: Record | None, fence: int, token: str) -> bool:
        """Return whether a receipt belongs to the task's present delivery."""
        return r is not None and bool(r.owner) and r.fence == fence and token in {r.owner, r.token}

    def settled_before(self, r: Record, fence: int, verb: str) -> str:
        """Answer a settlement that has no current receipt: a repeated one as before, any other one with "lost"."""
        return r.told if r.verb == verb and r.settled == fence else "lost"

    def ack(self, name: Name, fence: int, token: str, *, known: bool = True) -> str:
        """End a delivery as done. With ``known``, the process has seen the delivery, so its token is not checked."""
        r = self.tasks.get(name)
        if r is None:
            return "lost"
        if not (r.owner and r.fence == fence and (known or self.current(r, fence, token))):
            return self.settled_before(r, fence, "ack")
        self.add(name[0], "in_flight", -1)
        r = r._replace(handed=r.attempt, verb="ack", told="ok", settled=fence, losses=r.losses)
        self.finish(name, r, "done")
        return "ok"

    def redeliver(self, name: Name, fence: int, token: str, loser: str = "") -> str:
        """Return a delivery to its queue; if ``loser`` is its owner, count it as lost."""
        r = self.tasks.get(name)
        verb = "lost" if loser else "redeliver"
        if r is None:
            return "lost"
        if not self.current(r, fence, token):
            return self.settled_before(r, fence, verb)
        if loser and r.owner != loser:
            return "lost"
        return "dead" if self.hand_back(name, r, verb, lost=bool(loser)) else "ok"

    def dead_letter(self, name: Name, fence: int, token: str) -> str:
        """End a delivery by making its task a dead letter."""
        r = self.tasks.get(name)
        if r is None:
            return "lost"
        if not self.current(r, fence, token):
            return self.settled_before(r, fence, "bury")
        self.add(name[0], "in_flight", -1)
        settled = r._replace(handed=r.attempt, verb="bury", told="ok", settled=r.fence)
        self.bury(name, settled)
        return "ok"

    def leave(self, token: str) -> int:
        """Take back a consumer's deliveries, not counted as lost, and remove it; return their number."""
        return self.take_back(token, lost=False)

    def give_up(self, token: str) -> int:
        """Take back a silent consumer's deliveries, counted as lost, and remove it; return their number."""
        return self.take_back(token, lost=True)

    def take_back(self, token: str, *, lost: bool) -> int:
        """Return all deliveries of a consumer to their queues and remove the consumer; return their number."""
        held = [(name, r) for name, r in self.tasks.items() if r.owner == token]
        for name, r in held:
            self.hand_back(name, r, "", lost=lost)
        self.consumers.pop(token, None)
        return len(held)

    def cancel(self, name: Name) -> bool:
        """Cancel a live task; return False if there is none."""
        r = self.tasks.get(name)
        if r is None or not r.live:
            return False
        self.end_live(name, r, "cancelled")
        return True

    def reschedule(self, name: Name, at: int) -> bool:
        """Give a waiting or scheduled task another time, or end it if a purge has not reached it yet."""
        r = self.tasks.get(name)
        if r is None or not r.live or r.owner or r.handed == r.attempt:
            return False
        upto, since = self.purging.get(name[0], (0, 0))
        if r.seq <= upto and self.now < since + 60_000_000:
            self.purged = self.purged | {name[0]: self.purged.get(name[0], 0) + 1}
            self.end_live(name, r, "cancelled")
            return False
        if r.fresh:
            self.add(name[0], "fresh", 1)
        self.schedule(name, self.withdraw(name, r), at)
        return True

    def redrive(self, name: Name, *, discard: bool = False) -> bool:
        """Make a dead letter available again, or discard it."""
        r = self.tasks.get(name)
        if r is None or r.state != "dead":
            return False
        self.add(name[0], "dead", -1)
        if discard:
            self.finish(name, r, "discarded")
        else:
            self.make_available(name, r._replace(prior=r.attempt - 1, losses=0, worker=""))
        return True

    def first_deadlines(self) -> dict[str, int]:
        """Return the earliest deadline of each queue that has live tasks with deadlines."""
        first: dict[str, int] = {}
        for (key, _), r in self.tasks.items():
            if r.live and r.deadline:
                first[key] = min(r.deadline, first.get(key, r.deadline))
        return first

    def expire(self, limit: int = 1000) -> list[tuple[Name, int]]:
        """End live tasks whose deadline has passed, beginning with the queue that has the earliest deadline."""
        first = self.first_deadlines()
        late = [
            (name, r) for name, r in self.tasks.items() if r.live and 0 < r.deadline <= self.now
        ]
        late.sort(key=lambda pair: (first[pair[0][0]], pair[0][0], pair[1].deadline, pair[0][1]))
        late = late[:limit]
        for name, r in late:
            self.end_live(name, r, "expired")
        return [(name, r.attempt) for name, r in late]

    def silent(self, lease: int) -> list[str]:
        """Return consumers without a heartbeat for longer than the lease, those silent longest first."""
        limit = self.real - lease
        found = [(c.beat, token) for token, c in self.consumers.items() if c.beat <= limit]
        return [token for _, token in sorted(found)]

    def configure(self, key: str, terms: Terms) -> None:
        """Replace the settings of a queue; rate limit tokens are kept, up to the new maximum."""
        old, new = self.refilled(key), terms.flow
        tokens = min(old.tokens, new.max_tokens) if old.max_tokens else new.max_tokens
        flow = new._replace(tokens=tokens, at=max(old.at, self.now)) if new.limited else new
        self.terms[key] = terms._replace(flow=flow)
