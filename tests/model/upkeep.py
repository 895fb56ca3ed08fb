"""Maintenance, purges, the removal of queues and results: what the recorded calls do besides the delivery of tasks."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.model.books import OVER, Name, Record
from tests.model.schedules import Schedules

_LARGE = 4096
"""from which size a body makes the reads of its queue small"""
_QUEUE_TTL = 86_400_000_000
"""microseconds after which an unused queue without settings is removed"""
_REVISITED = 10_000_000
"""microseconds after which maintenance looks again at a queue that keeps ended tasks for longer than their ids"""


class Upkeep(Schedules):
    """The parts of the specification that the small models do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: dict[Name, bytes] = {}
        self.versions: dict[str, tuple[int, bytes]] = {}
        """by queue key, the version of its settings and these as JSON"""
        self.results: dict[Name, tuple[bytes | None, int]] = {}
        """results, each with the time until which its task is kept"""
        self.ends: dict[str, dict[str, list[tuple[int, str]]]] = {}
        """by queue key and state, when which tasks ended, the oldest first; the id of an erased task is empty"""
        self.dropped: Counter[tuple[str, str]] = Counter()
        """by queue key and state, how many tasks have left the front of this list"""
        self.looks: dict[str, int] = {}
        """by queue key, when maintenance looks at the ended tasks"""
        self.large: set[str] = set()
        """keys of queues that have had large bodies"""
        self.idle: dict[str, int] = {}
        """by the key of each queue that exists, when it is checked next whether it is unused"""
        self.marks: dict[str, int] = {}
        """by queue key, the last sequence number when the queue was found unused"""
        self.swept = self.armed = self.checked = 0
        """times of the last maintenance, of the last start of all leases, and of the last checks"""
        self.sweeper: tuple[bytes, int, bool] | None = None
        """process that continues maintenance, until when the others leave it to this one, and whether work was left"""

    def size(self, name: Name) -> int:
        """Return the size of a task's body."""
        return len(self.bodies[name])

    def meet(self, key: str) -> None:
        """Create a queue if it does not exist."""
        self.idle.setdefault(key, self.now + _QUEUE_TTL)

    def queue_ttl(self, key: str) -> int:
        """Return after how many microseconds without use a queue is removed."""
        if key not in self.versions:
            return _QUEUE_TTL
        settings: dict[str, float] = json.loads(self.versions[key][1])
        return int(settings["queue_ttl"] * 1_000_000)

    def is_large(self, key: str) -> bool:
        """Return whether the queue has had large bodies."""
        return key in self.large

    def is_costly(self, key: str) -> bool:
        """Return whether few tasks of a queue are read at once."""
        return self.is_large(key) or super().is_costly(key)

    def make_available(self, name: Name, r: Record) -> None:
        """Put a task at the end of its lane, and note whether its body is large."""
        super().make_available(name, r)
        if self.size(name) > _LARGE:
            self.large.add(name[0])

    def remember(self, name: Name, state: str) -> None:
        """Note when a task has ended."""
        key, task = name
        ended = self.ends.setdefault(key, {}).setdefault(state, [])
        ended.append((self.now, task))
        if len(ended) == 1:
            soon = self.now + self.terms_of(key).window
            self.looks[key] = min(soon, self.looks.get(key, soon))

    def keep_result(self, name: Name, result: bytes) -> None:
        """Replace the result of a task that was acked just now."""
        if result:
            self.results[name] = result, self.now + self.terms_of(name[0]).result_ttl
        elif name in self.results:
            self.results[name] = None, self.results[name][1]

    def on_purge(self, words: list[bytes], _: Any) -> Any:
        """Cancel the waiting and scheduled tasks of a queue."""
        key, budget = words[0].decode(), int(words[2])
        self.meet(key)
        number, _, start = words[1].decode().partition(":")
        upto = int(number or self.last.get(key, 0))
        start = start or "-inf"
        mark = max(self.purging.get(key, (0, 0))[0], upto)
        purged = 0
        names = [name for name, r in self.of(key) if r.open and r.seq <= upto]
        parked = set[int]()
        for name in sorted(names, key=lambda one: self.tasks[one].rank):
            r = self.tasks[name]
            # The returned tasks of a priority are read at once. Their bodies are not read.
            if budget <= 0 or (self.sated and r.priority not in parked):
                break
            if r.place == "fresh":
                if self.sated:
                    break
                self.read += self.size(name)
            else:
                parked.add(r.priority)
            purged += self.cancel(name)
            budget -= 1
        if budget > 0 and not self.sated:
            later = ((r.due, r.seq, name) for name, r in self.of(key) if r.state == "scheduled")
            after = float(start.removeprefix("("))
            for due, seq, name in [one for one in sorted(later) if one[0] > after][:budget]:
                budget -= 1
                if seq <= upto:
                    purged += self.cancel(name)
                else:
                    start = f"({due}"
        ended = self.purge_blocked(key, upto, budget)
        purged, budget = purged + ended, budget - ended
        done = budget > 0 and not self.sated
        if done and mark == upto:
            self.purging = {one: place for one, place in self.purging.items() if one != key}
        elif not done and (self.later.get(key) or self.count(key, "blocked")):
            self.purging = self.purging | {key: (mark, self.now)}
        purged += self.purged.get(key, 0)
        self.purged = {one: n for one, n in self.purged.items() if one != key}
        return [purged, int(done), f"{upto}:{start}"]

    def purge_blocked(self, key: str, upto: int, budget: int) -> int:
        """Cancel blocked tasks, the oldest first; return their number."""
        blocked = sorted((r.seq, name) for name, r in self.of(key) if r.state == "blocked")
        names = [name for seq, name in blocked if seq <= upto and not self.sated]
        return sum(self.cancel(name) for name in names[: max(budget, 0)])

    def uses(self, key: str) -> list[int]:
        """Return what a queue is in use by: waiting, scheduled and running tasks, dead letters, subscriptions."""
        uses = [self.count(key, name) for name in ("waiting", "scheduled", "in_flight", "dead")]
        uses.append(sum(key in consumer.keys for consumer in self.consumers.values()))
        return [*uses, self.count(key, "blocked")]

    def on_delete(self, words: list[bytes], _: Any) -> Any:
        """Delete a queue that is not in use."""
        key = words[0].decode()
        known, uses = int(key in self.idle), self.uses(key)
        if any(uses):
            return [known, 0, 1, uses]
        old = [name for name, _ in self.of(key)]
        self.remove(key, settings=True)
        return [known, len(old), 1, uses]

    def remove(self, key: str, *, settings: bool) -> None:
        """Delete a queue without tasks; without ``settings``, a queue that has settings keeps them and its counters."""
        for name in [name for name, _ in self.of(key)]:
            del self.tasks[name], self.bodies[name]
            self.results.pop(name, None)
        self.large.discard(key)
        self.purging = {one: place for one, place in self.purging.items() if one != key}
        self.purged = {one: n for one, n in self.purged.items() if one != key}
        for place in [place for place in self.dropped if place[0] == key]:
            del self.dropped[place]
        tables: list[dict[str, Any]] = [self.open, self.later, self.marks, self.ends, self.looks]
        if settings or key not in self.versions:
            tables += [self.last, self.terms, self.versions, self.idle]
            for place in [place for place in self.counts if place[0] == key]:
                del self.counts[place]
        for table in tables:
            table.pop(key, None)

    def remove_idle(self) -> int:
        """Remove queues that were unused at the last check and have had no task since then; return their number."""
        removed = 0
        due = sorted((at, key) for key, at in self.idle.items() if at <= self.now)
        for _, key in due[:100]:
            held = self.ends.get(key, {}).get("done") or any(True for _ in self.of(key))
            if held or any(self.uses(key)):
                self.marks.pop(key, None)
            elif self.marks.get(key) == self.last.get(key, 0):
                self.remove(key, settings=False)
                removed += 1
            else:
                self.marks[key] = self.last.get(key, 0)
            if key in self.idle:
                self.idle[key] = self.now + self.queue_ttl(key)
        return removed

    def on_maintain(self, words: list[bytes], answer: Any) -> Any:
        """Run a pass of maintenance. How long it took is taken from the answer."""
        lease, period, budget = map(int, words[:3])
        process = words[4]
        if not self.swept or not self.armed or self.real - self.swept > 3 * period:
            self.armed = self.real
        self.swept = self.real
        sweeper, until, was_behind = self.sweeper or (None, 0, False)
        claimed = sweeper is not None and until >= self.real
        continues = claimed and sweeper == process
        checks = not continues or self.real - self.checked >= period
        promoted = self.promote_due(budget)
        expired = self.expire(budget)
        given_up, recovered = [], 0
        for token in self.silent(lease) if self.real - self.armed > lease else ():
            given_up.append([token, self.consumers[token].worker])
            recovered += self.give_up(token)
            assert recovered < budget, "a pass took back only a part"
            if self.sated:
                assert not recovered, "a pass took back only a part"
                break
        forgotten = self.forget(budget)
        if checks:
            self.forget_batches()
        removed = self.remove_idle()
        self.settle()
        unclaimed: Any = ""
        if checks:
            self.checked, unclaimed = self.real, self.unclaimed()
        behind, took = self.behind(), ""
        if not (claimed and not continues) and (behind or (continues and was_behind)):
            took = str(int(answer[10])) if behind else "0"
            self.sweeper = process, self.real + 4 * int(took) + 2_000_000, bool(behind)
        elif continues:
            self.sweeper = None
        told = sorted([key, task, attempt] for (key, task), attempt in expired)
        figures = [promoted, told, forgotten, recovered, "0", sorted(given_up), unclaimed, "0", "0"]
        return [*figures, behind, took, [], removed]

    def forget_batches(self) -> None:
        """Forget batches that ended long ago, in the subclass that knows batches."""

    def behind(self) -> str:
        """Return for how long the work that is left has been due; empty if none is left."""
        times = [self.first_due(), *self.first_deadlines().values(), *self.idle.values()]
        times += [until for _, until in self.results.values()]
        first = min((*times, *self.looks.values()), default=math.inf)
        return str(int(self.now - first)) if first <= self.now else ""

    def unclaimed(self) -> list[str]:
        """Return the queues that have waiting tasks but no subscriber."""
        claimed = {key for consumer in self.consumers.values() for key in consumer.keys}
        keys = {name[0] for name in self.tasks} - claimed
        return sorted(key for key in keys if self.count(key, "waiting"))

    def forget(self, budget: int) -> int:
        """Delete expired results, and the records of tasks that ended longer ago than the queue's window.

        Return the number of records. The record of a task that has a result is kept as long as the result.
        """
        forgotten, looked = 0, 0
        late = sorted(
            (until, name) for name, (_, until) in self.results.items() if until <= self.now
        )
        for key in dict.fromkeys(name[0] for _, name in late):
            ids = [name[1] for _, name in late if name[0] == key][: budget - looked]
            looked += len(ids)
            for task in ids:
                del self.results[key, task]
            forgotten += self.forget_some(key, [(None, task) for task in ids])
        looked = 0
        late_keys = sorted((at, key) for key, at in self.looks.items() if at <= self.now)
        for _, key in late_keys[:budget]:
            for state, ended in self.ends.get(key, {}).items():
                some = self.outlived(key, state, budget - looked)
                forgotten += self.forget_some(key, some)
                del ended[: len(some)]
                self.dropped[key, state] += len(some)
                looked += len(some)
            self.look_later(key)
            if looked >= budget:
                break
        return forgotten

    def outlived(self, key: str, state: str, budget: int) -> list[tuple[int, str]]:
        """Return the tasks of a list that are kept no longer: for their time, or because there are too many."""
        terms, ended = self.terms_of(key), self.ends[key][state]
        kept = terms.window if state == "replaced" else terms.kept
        surplus = len(ended) - terms.most if kept > terms.window else 0
        for n, (at, _) in enumerate(ended[:budget]):
            if at + terms.window > self.now or (at + kept > self.now and n >= surplus):
                return ended[:n]
        return ended[:budget]

    def look_later(self, key: str) -> None:
        """Set when maintenance looks at the ended tasks of a queue the next time."""
        terms = self.terms_of(key)
        times = [
            ended[0][0] + (terms.window if state == "replaced" else terms.kept)
            for state, ended in self.ends.get(key, {}).items()
            if ended
        ]
        self.looks.pop(key, None)
        if times and terms.kept > terms.window:
            times.append(self.now + _REVISITED)
        if times:
            self.looks[key] = min(times)

    def forget_some(self, key: str, ends: Sequence[tuple[int | None, str]]) -> int:
        """Delete the records of tasks that have ended at these times (None for any); return their number.

        Without a time, because the result has expired, a task is kept until it leaves the list of its state.
        """
        forgotten, terms = 0, self.terms_of(key)
        for at, task in ends:
            name = key, task
            r = self.tasks.get(name)
            if r is None or r.state not in OVER or at not in {None, r.at} or name in self.results:
                continue
            till = max(r.unique.till if r.unique else 0, r.at + terms.window if at is None else 0)
            listed = (r.at, task) in self.ends.get(key, {}).get(r.state, ())
            if at is None and listed and r.at + terms.kept > self.now:
                continue
            if self.now < till:
                self.results[name] = None, till  # kept as long as a result would be
            else:
                del self.tasks[name], self.bodies[name]
                forgotten += 1
        return forgotten
