"""Runs the specification on the recorded script calls of a real Redis, and compares every answer.

The order in which Redis walks over the keys of a consumer is taken from its answer. Features that the specification
does not cover (fair order, ordering keys, hung tasks) raise an error, so that they never count as a pass.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from tests.model.answers import error_of, normal, plain, walked
from tests.model.books import OVER, Name, Record
from tests.model.deliveries import Gone, Late
from tests.model.kin import linked_as, published, shown
from tests.model.looks import Looks, number_of
from tests.model.spec import Retry
from tests.model.terms import Flow, Terms
from tests.model.tracing import Call
from tests.model.unique import Publish, Unique

_FLOWS = 6
"""number of limits that the specification covers; the remaining ones concern time and order"""


class Mismatch(AssertionError):
    """An answer of Redis differs from the specification's."""


class Replay(Looks):
    """The specified state of one partition; `take` applies one recorded call after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0
        self.compared = 0
        self.filled = 0
        """number of calls that ended their work because they had processed so many bytes"""
        self.replacements = 0
        """number of tasks that were given the contents of another one with their unique key"""

    def take(self, call: Call) -> None:
        """Apply a recorded call. Raises `Mismatch` if Redis answered differently."""
        self.taken += 1
        error, answer = error_of(call.answer)
        if error.startswith("TQ RESET"):
            return
        self.now, self.real = call.now, call.real
        self.read = self.promoted = self.looked = 0
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
        self.settle()
        self.compared += 1
        self.filled += self.sated
        expected, answer = plain(expected), plain(normal(call.name, answer))
        if expected != answer:
            raise Mismatch(f"call {self.taken}: {call}\n  told     {answer}\n  expected {expected}")

    def on_publish(self, words: list[bytes], _: Any) -> Any:
        """Publish tasks."""
        told: list[Any] = [0]
        while words:
            key, number = words[0].decode(), int(words[1])
            told[0] = max(told[0], self.terms_of(key).replicas)
            self.meet(key)
            told += self.publish(key, [])  # promotes due tasks first
            for n in range(2, 2 + 3 * number, 3):
                told.append(self.store(key, words[n], words[n + 1], words[n + 2]))
                if self.ends_early:
                    return told
            del words[: 2 + 3 * number]
        return told

    def store(self, key: str, task: bytes, about: bytes, body: bytes) -> int | str:
        """Publish one task, and keep its body if it is accepted."""
        name = key, task.decode()
        known, self.bodies[name] = self.bodies.get(name), body
        before = self.tasks.get(name)
        answer = self.publish_one(key, published(task, about, body))
        accepted = isinstance(answer, int) and answer >= 0
        is_new = accepted or (name in self.tasks and self.tasks[name] is not before)
        if is_new and self.results.get(name, (None,))[0] is not None:
            del self.results[name]
        if accepted:
            pass
        elif is_new:  # no task: it has given its contents to another one
            self.bodies[name] = b""
        elif known is None:
            del self.bodies[name]
        else:
            self.bodies[name] = known
        return answer

    def take_contents(self, name: Name, other: Name, task: Publish) -> None:
        """Give a task the body of another one; its checksum covers the id."""
        self.replacements += 1
        r, former, body = self.tasks[name], self.bodies[name], self.bodies[other][:-4]
        checksum = zlib.crc32(name[1].encode(), zlib.crc32(body))
        self.bodies[name] = body + checksum.to_bytes(4, "big")
        if name in self.waits or name in self.inputs or r.batch or task.after or task.batch:
            self.bodies[name] = linked_as(self.bodies[name], former)

    def on_schedule_retry(self, words: list[bytes], _: Any) -> Any:
        """Schedule a retry."""
        key, task, at, name = words[0].decode(), words[1].decode(), int(words[2]), words[3].decode()
        known = self.tasks.get((key, task))
        ask = Retry(
            at, name, int(words[6] or 0), words[7].decode(), int(words[8]), words[9].hex(), int(words[10]),
            int(words[11] or 0), words[15] == b"1", Unique.read(words[17]), words[18].decode(),
            words[13].decode(), tuple(json.loads(words[19] or b"[]")),
        )  # fmt: skip
        answer = self.schedule_retry((key, task), ask)
        if answer != "lost":
            self.meet(key)
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
        for word in walked(answer) if answer else ():
            order.setdefault(word.decode())
        for key in {*asked[:200], *order}:
            self.meet(key)
        told = self.receive(
            token, int(turn), int(limit), look=look == "1", asked=asked, order=tuple(order)
        )
        self.sign_of_life(token)
        return [
            self.now,
            told.due or "",
            int(told.again),
            sorted([key, task, attempt] for (key, task), attempt in told.expired),
            [
                [name[0], r.lane, *self.entry(name, r), self.inputs_of(name)]
                for name, r in told.given
            ],
            sorted(told.left),
            sorted(told.others),
            sorted([key, at or ""] for key, at in told.closed),
        ]

    def entry(self, name: Name, r: Record) -> list[Any]:
        """Return a task's entry in the form in which a script delivers it."""
        more = r.more
        if name in self.inputs and not more:
            more = f"{r.attempt}:{r.losses}:{r.prior}:"
        return [r.fence, name[1], shown(self.bodies[name]), more]

    def inputs_of(self, name: Name) -> list[bytes | None]:
        """Return the results of parents that are delivered with a task."""
        number, kept = self.inputs.get(name, 0), self.kept.get(name, {})
        self.read += sum(map(len, kept.values())) if number else 0
        return [kept.get(n) for n in range(number)]

    def on_pending(self, words: list[bytes], _: Any) -> Any:
        """Return a page of the receipts of what a consumer has in flight."""
        token, turn, after, fence, most = (word.decode() for word in words)
        lanes: dict[str, list[tuple[int, str]]] = {}
        for (key, _), r in self.pending(token, int(turn)):
            if (r.lane + key, r.fence) > (after, int(fence or 0)):
                lanes.setdefault(r.lane + key, []).append((r.fence, r.token))
        self.sign_of_life(token)
        page, left, following = list[Any](), int(most), list[Any]()
        for lane, receipts in sorted(lanes.items()):
            some = sorted(receipts)[:left]
            left -= len(some)
            numbers, owners = zip(*some, strict=True)
            page.append([lane[2:], lane[:2], numbers, owners])
            if left == 0:
                following = [lane, numbers[-1]]
                break
        return [page, following]

    def on_adopt(self, words: list[bytes], _: Any) -> Any:
        """Move deliveries to another consumer."""
        heir, told = words[0].decode(), list[Any]()
        if heir not in self.consumers:
            raise Gone
        for n in range(1, len(words), 4):
            if self.sated:
                break
            key, lane, fence, token = (word.decode() for word in words[n : n + 4])
            self.meet(key)
            name = self.held(key, lane, int(fence))
            r = name and self.adopt(heir, name, int(fence), token)
            told.append([*self.entry(name, r)[1:], self.inputs_of(name)] if name and r else [])
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
            self.meet(key)
            for n in range(5, 5 + 3 * int(number), 3):
                name = key, words[n].decode()
                before = self.tasks.get(name)
                self.result = words[n + 2]
                told.append(self.ack(name, int(words[n + 1]), token, known=known == "1"))
                if self.tasks.get(name) is not before:
                    self.keep_result(name, words[n + 2])
            self.result = b""
            del words[: 5 + 3 * int(number)]
        return told

    def on_redeliver(self, words: list[bytes], _: Any) -> Any:
        """Return deliveries to their queue."""
        loser, *rest = (word.decode() for word in words)
        told = list[str]()
        for n in range(0, len(rest), 4):
            if self.sated:
                break
            self.meet(rest[n])
            name = rest[n], rest[n + 1]
            told.append(self.redeliver(name, int(rest[n + 2]), rest[n + 3], loser))
        return told

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
        numbers = [float(word) for word in words[15:]]
        if any(numbers[_FLOWS:]) or any(words[9:12]):
            raise Mismatch(f"queue {key} has settings that the specification does not know")
        terms = Terms(
            int(words[3]), int(words[5]), int(words[4]), int(words[8]), Flow(*numbers[:_FLOWS]),
            frozenset(filter(None, words[12].decode().split("\0"))), int(words[13]), int(words[14]),
        )  # fmt: skip
        self.configure(key, terms)
        self.look_later(key)
        self.idle[key] = self.now + self.queue_ttl(key)
        return "ok"

    def on_cancel(self, words: list[bytes], _: Any) -> Any:
        """Cancel a task."""
        self.meet(words[0].decode())
        return int(self.cancel((words[0].decode(), words[1].decode())))

    def on_erase(self, words: list[bytes], _: Any) -> Any:
        """Erase the first tasks that have a tag."""
        key, tag, budget = words[0].decode(), words[1].decode(), int(words[2])
        self.meet(key)
        found = sorted((r.published, name) for name, r in self.of(key) if tag in r.indexed)
        found, before = found[: budget + 1], list[int]()
        for _, name in found[:budget]:
            if self.sated:
                break
            before.append(number_of(self.tasks[name]))
            self.erase(name)
        return [before, int(len(before) < len(found))]

    def erase(self, name: Name) -> None:
        """End a task if it has not ended, and delete it. Its place in the list of its end stays."""
        if not self.cancel(name) and self.redrive(name, discard=True):
            self.read += self.size(name)
        r = self.tasks[name]
        ended = self.ends[name[0]][r.state]
        if (r.at, name[1]) in ended:
            ended[ended.index((r.at, name[1]))] = r.at, ""
        del self.tasks[name], self.bodies[name]
        self.results.pop(name, None)

    def on_reschedule(self, words: list[bytes], _: Any) -> Any:
        """Give a task another time."""
        self.meet(words[0].decode())
        return int(self.reschedule((words[0].decode(), words[1].decode()), int(words[2])))

    def on_redrive(self, words: list[bytes], _: Any) -> Any:
        """Redrive or discard dead letters."""
        key, discard, budget = words[0].decode(), words[1] == b"discard", int(words[3])
        upto = int(words[2] or self.last.get(key, 0))
        self.meet(key)
        if not discard and self.due(key) <= self.now:
            self.promote(key, 500)
        dead = sorted((r.due, name) for name, r in self.of(key) if r.state == "dead")
        names = [name for place, name in dead if place <= upto][:budget]
        if words[4:]:
            names = [(key, word.decode()) for word in words[4:]]
        moved = looked = 0
        for name in names:
            if self.sated:
                break
            looked += 1
            if self.redrive(name, discard=discard):
                moved += 1
                self.read += self.size(name)
        over = not words[4:] and looked == len(names) < budget
        return [moved, int(over), upto, looked]

    def on_promote(self, words: list[bytes], _: Any) -> Any:
        """Make due tasks available."""
        promoted = self.promote_due(int(words[0]))
        return [promoted, _moment(self.first_due())]


def replay(calls: Iterable[Call], kind: type[Replay] = Replay) -> Replay:
    """Apply the calls to a specification, in order. Raises `Mismatch` at the first answer that differs."""
    model = kind()
    for call in calls:
        model.take(call)
    return model


def _moment(time: float) -> Any:
    return int(time) if time < math.inf else ""
