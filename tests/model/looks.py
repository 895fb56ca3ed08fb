"""The scripts that only read, in the specification: counters, statuses, results, dead letters, and lists of tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tests.model.answers import COUNTED, IN_FLIGHT, STATES
from tests.model.books import OVER, Name, Record
from tests.model.fires import Fires
from tests.model.kin import shown

_LAST = 100
"""place in the order of sections of those that have no priority"""


class Item(NamedTuple):
    """A place in a list, with the task that is or was there."""

    order: tuple[int, Any]
    """sort key among the places of the list"""
    position: str
    """what a page that begins after this place is asked for with"""
    name: Name
    r: Record | None
    """nothing if the task is elsewhere now"""
    size: int = 0
    """number of bytes that are read for it"""
    at: int = 0
    """the time by which a list by time is sorted"""


class Looks(Fires):
    """The scripts that only read."""

    def on_stats(self, words: list[bytes], _: Any) -> Any:
        """Return the counters of queues."""
        return [self.statistics_of(word.decode()) for word in words]

    def statistics_of(self, key: str) -> list[Any]:
        """Return the counters of a queue, the time of its oldest task, and its number of subscribers."""
        oldest = min((r.seq for _, r in self.of(key) if r.open), default=0)
        subscribers = sum(key in consumer.keys for consumer in self.consumers.values())
        counters = [*(self.count(key, counter) for counter in COUNTED), self.held_in(key)]
        return [counters, min(oldest, self.now) or "", subscribers]

    def on_status(self, words: list[bytes], answer: Any) -> Any:
        """Return the full records of tasks. The sizes of their errors and retry tokens are taken from the answer."""
        key, told = words[0].decode(), list[Any]()
        for word, (packed, _, cold, *_) in zip(words[1:], _padded(answer), strict=False):
            name = key, word.decode()
            told.append(self.told_of(self.tasks.get(name), self.parents_of(name)))
            self.read += len(packed or b"") + len(cold or b"")
            if self.sated:
                break
        return told

    def on_result(self, words: list[bytes], _: Any) -> Any:
        """Return the results of tasks."""
        key, told = words[0].decode(), list[bytes | None]()
        for word in words[1:]:
            result, until = self.results.get((key, word.decode()), (None, 0))
            told.append(result if until > self.now else None)
            self.read += len(told[-1] or b"")
            if self.sated:
                break
        return told

    def told_of(self, r: Record | None, parents: list[Any]) -> list[Any]:
        """Return a task's record in the form of the script's answer; empty if the task is unknown."""
        if r is None:
            return []
        place = "parked" if r.state == "dead" else r.place
        return [
            r.state, place, r.priority, r.attempt, r.losses, r.prior, r.handed, r.seq, r.fence, r.at, r.digest, r.verb,
            int(r.told == "dead"), r.settled, int(bool(r.owner)), parents,
        ]  # fmt: skip

    def on_dead_letters(self, words: list[bytes], answer: Any) -> Any:
        """List dead letters. The sizes of their errors and retry tokens are taken from the answer."""
        key = words[0].decode()
        dead = [
            name[1] for _, name in sorted((r.due, n) for n, r in self.of(key) if r.state == "dead")
        ]
        after = words[1].decode()
        if not int(words[2]):  # the caller asks for this dead letter only
            asked = [after] if after in dead else []
        else:
            start = dead.index(after) + 1 if after in dead else 0
            asked = dead[start : start + int(words[2])]
        told = list[Any]()
        for task, (*_, cold, body) in zip(asked, _padded(answer[0]), strict=False):
            told.append([task, shown(self.bodies[key, task])])
            self.read += len(cold or b"") + len(body or b"")
            if self.sated:
                break
        return [told, int(len(told) < len(asked))]

    def on_list(self, words: list[bytes], _: Any) -> Any:
        """Return a page of a list of tasks, without their errors."""
        asked = (word.decode() for word in words)
        key, kind, position, want, budget, newest, tenant, tag, state, worker, *rest = asked
        since, until, *tokens = rest

        def is_wanted(r: Record) -> bool:
            return (
                tenant in {"", r.tenant}
                and worker in {"", self.shown_worker(r)}
                and state in {"", str(number_of(r))}
            )

        items = [
            item
            for item in self.items_of(key, kind, tag, tokens if worker else None)
            if int(since or 0) <= item.at and not (until and int(until) <= item.at)
        ]
        items.sort(key=lambda item: item.order, reverse=newest == "1")
        if position:
            start = _order_of(position)
            items = [
                item
                for item in items
                if (item.order < start if newest == "1" else item.order > start)
            ]
        told, looked, last = list[Any](), 0, ""
        for item in items:
            is_full = len(told) >= int(want) or looked >= int(budget)
            if is_full or (looked and self.sated):
                return [told, last, looked]
            looked += 1
            if item.r is not None and is_wanted(item.r):
                told.append(self.summary(item.name, item.r))
            self.read += item.size
            last = item.position
        return [told, "", looked]

    def items_of(self, key: str, kind: str, tag: str, tokens: Sequence[str] | None) -> list[Item]:
        """Return all places of a list, in any order; of tasks in flight, only those of some consumers."""
        records = [(name, r) for name, r in self.of(key) if r.state != "replaced"]
        match kind:
            case "tag":
                return [_tagged(name, r) for name, r in records if tag in r.indexed]
            case "waiting":
                found = [(name, r) for name, r in records if r.open]
                return [self.waiting_item(name, r) for name, r in found]
            case "in_flight":
                found = [(name, r) for name, r in records if r.owner]
                return [
                    self.open_item(str(r.priority), name, r)
                    for name, r in found
                    if tokens is None or r.owner in tokens
                ]
            case "scheduled" | "blocked" | "dead":
                return [_member(kind, name, r) for name, r in records if r.state == kind]
        return self.ended_items(key, kind)

    def waiting_item(self, name: Name, r: Record) -> Item:
        """Return the place of a waiting task: with those that came back, or in the stream of its priority."""
        if r.place == "parked":
            return _set_item(f"z{r.priority}", r.seq, name[1], name, r)
        return self.open_item(f"s{r.priority}", name, r)

    def open_item(self, section: str, name: Name, r: Record) -> Item:
        """Return the place of a task by its entry in the stream of its priority."""
        order = _place(section), r.fence
        return Item(order, f"{section} {r.fence}", name, r, self.size(name))

    def shown_worker(self, r: Record) -> str:
        """Return the worker that has the task, or the last one of a dead letter or a kept task; empty for none."""
        return self.worker_of(r.owner) or r.worker

    def ended_items(self, key: str, state: str) -> list[Item]:
        """Return the places of the list of one end. A place stays if its id is used again, or if its task is erased."""
        items, first = [], self.dropped[key, state]
        for n, (at, task) in enumerate(self.ends.get(key, {}).get(state, ()), first):
            r = self.tasks.get((key, task))
            is_here = r is not None and (r.state, r.at) == (state, at)
            shown = r if is_here else None
            items.append(Item((_LAST, n), f"{state} {n}", (key, task), shown, at=at))
        return items

    def summary(self, name: Name, r: Record) -> list[Any]:
        """Return what a list shows of a task."""
        due = r.due if r.state == "scheduled" else ""
        numbers = [number_of(r), r.attempt, r.losses, r.priority]
        return [name[1], *numbers, r.tenant, "", r.at, due, self.shown_worker(r), _joined(r.tags)]

    def on_task(self, words: list[bytes], _: Any) -> Any:
        """Return what is known of a task, without the time of its last delivery."""
        name = words[0].decode(), words[1].decode()
        r = self.tasks.get(name)
        if r is None or r.state == "replaced":
            return []
        body = None if r.state in OVER else shown(self.bodies[name])
        published, tags = (f"{r.published:017}", _joined(r.tags)) if r.tags else (None, None)
        status = self.told_of(r, self.parents_of(name))
        return [status, body, r.seq, published, tags, self.shown_worker(r) or None, r.tenant]


def number_of(r: Record) -> int:
    """Return the number by which scripts name the state of a task."""
    return IN_FLIGHT if r.owner else STATES.index(r.state) + 1


def _joined(tags: Sequence[str]) -> str:
    return "".join(f"\0{tag}" for tag in tags)


def _place(section: str) -> int:
    """Return the place of a section among others."""
    if not section[-1].isdigit():
        return _LAST
    return 3 * (9 - int(section[-1])) + " zrs".index(section[:-1] or "z")


def _set_item(section: str, score: int, member: str, name: Name, r: Record) -> Item:
    return Item((_place(section), (score, member)), f"{section} {score}:{member}", name, r)


def _member(kind: str, name: Name, r: Record) -> Item:
    """Return the place of a task that is scheduled, blocked or dead."""
    score = r.seq if kind == "blocked" else r.due
    member = f"{r.seq:017}{name[1]}" if kind == "scheduled" else name[1]
    item = _set_item(kind, score, member, name, r)
    return item._replace(at=r.due if kind == "scheduled" else r.at)


def _tagged(name: Name, r: Record) -> Item:
    place = f"{r.published:017}\0{name[1]}"
    return Item((_LAST, place), f"tag {place}", name, r)


def _order_of(position: str) -> tuple[int, Any]:
    """Return the sort key of a place by its position."""
    section, _, place = position.partition(" ")
    if section == "tag":
        return _LAST, place
    if ":" in place:
        score, _, member = place.partition(":")
        return _place(section), (int(score), member)
    return _place(section), int(place)


def _padded(answer: list[Any]) -> Iterator[list[Any]]:
    """Yield the answers per task, with empty fields for an unknown task, and then only empty fields."""
    for told in answer:
        yield told or [None] * 4
    while True:
        yield [None] * 4
