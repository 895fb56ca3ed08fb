"""Tasks that wait for others, and the counts of batches, in the specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.model.books import OVER, Name, Record
from tests.model.kin import After, Said, Wait, named, text
from tests.model.spec import Retry
from tests.model.unique import Publish
from tests.model.upkeep import Upkeep

AT_ONCE = 16
"""maximum number of children that one end informs directly"""
_MOST = 250
"""the same, for one call"""
_INPUTS = 262_144
"""maximum number of bytes of all inputs of a task"""
_PARENTS = 1000
"""number of parents after which a call leaves further tasks to the next one"""
STAYS = ("dead", "alive")
"""reports after which the children stay noted, because the parent may change again"""


class Waits(Upkeep):
    """The parts of the specification that concern tasks that wait for others."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        """highest number of a line or a report"""
        self.waits: dict[Name, Wait] = {}
        self.kept: dict[Name, dict[int, bytes]] = {}
        """inputs of tasks that have not ended"""
        self.inputs: dict[Name, int] = {}
        """number of inputs of released tasks that have some"""
        self.children: dict[str, set[str]] = {}
        """by parent: child, entry and kind of those that wait for it"""
        self.lines: dict[str, Said] = {}
        self.unreported: dict[str, Said] = {}
        """parents whose last change is not yet reported to all of their children"""
        self.batches: dict[str, list[int]] = {}
        """by batch: version, closed, added, done, failed, dead"""
        self.counted: dict[str, None] = {}
        """batches whose counts the current call has changed"""
        self.changed: list[tuple[str, str, bytes]] = []
        """parents that the current call has changed, each with its state and result"""
        self.left = 0
        """number of children that the current call may still inform"""
        self.looked = 0
        """number of parents that the current call has looked at"""
        self.result = b""
        """result of the task that is acked at the moment"""

    @property
    def ends_early(self) -> bool:
        """Whether the call leaves further tasks to the next one."""
        return self.looked >= _PARENTS

    def next_number(self) -> int:
        """Return a number that is higher than all earlier ones."""
        self.number = max(self.number + 1, self.now)
        return self.number

    def settle(self) -> None:
        """Do what a call does at its end."""
        self.left = min(AT_ONCE * len(self.changed), _MOST)
        while self.changed:
            self.inform_children(*self.changed.pop(0))
        for batch in self.counted:
            count = self.batches[batch]
            count[0] = self.next_number()
            if count[1] and count[2] == count[3] + count[4]:
                self.add_line(f"count {batch} -", counts=tuple(count))
        self.counted = {}

    def add_line(self, name: str, **said: Any) -> None:
        """Write a line, or replace the one with the same name."""
        self.lines[name] = Said(self.next_number(), **said)

    def count_member(self, batch: str, field: int, n: int) -> None:
        """Count a change of a member of a batch."""
        self.batches.setdefault(batch, [0] * 6)[field] += n
        self.counted.setdefault(batch)

    def forget_batches(self) -> None:
        """Forget batches that were closed and whose members ended long ago."""
        day = 86_400_000_000
        self.batches = {
            batch: count
            for batch, count in self.batches.items()
            if batch in self.counted
            or not count[1]
            or count[2] != count[3] + count[4]
            or count[0] + day > self.now
        }

    def note_change(self, name: Name, r: Record, state: str, result: bytes = b"") -> None:
        """Note a new state of a task, of which ``r`` is the record before."""
        if r.parent:
            self.changed.append((text(name), state, result))
        if r.batch:
            if r.state == "dead":
                self.count_member(r.batch, 5, -1)
            if state not in STAYS:
                self.count_member(r.batch, 3 if state == "done" else 4, 1)
            if state == "dead":
                self.count_member(r.batch, 5, 1)
        wait = self.waits.get(name) if state not in STAYS else None
        if wait is not None and wait.counts is not None and not wait.sealed:
            self.add_line(f"close {text(name)} -")
        if state not in STAYS:
            for table in (self.kept, self.inputs, self.waits):
                table.pop(name, None)

    def finish(self, name: Name, r: Record, state: str) -> None:
        """End a task; its children are informed at the end of the call."""
        self.note_change(name, r, state, self.result)
        super().finish(name, r._replace(parent=False, batch=""), state)

    def bury(self, name: Name, r: Record) -> None:
        """Make a task a dead letter."""
        self.note_change(name, r, "dead")
        super().bury(name, r)

    def redrive(self, name: Name, *, discard: bool = False) -> bool:
        """Make a dead letter available again, or discard it."""
        r = self.tasks.get(name)
        if r is not None and r.state == "dead" and not discard:
            self.note_change(name, r, "alive")
        return super().redrive(name, discard=discard)

    def schedule_retry(self, name: Name, ask: Retry) -> str:
        """Schedule a retry, which may revive a dead letter. A blocked task stays blocked."""
        r = self.tasks.get(name)
        if r is not None and r.state == "blocked":
            return self.retry_blocked(name, r, ask)
        answer = super().schedule_retry(name, ask)
        if answer == "accepted" and r is not None and r.state == "dead":
            self.note_change(name, r, "alive")
        elif answer == "accepted" and ask.batch and (r is None or r.state in OVER):
            self.count_member(ask.batch, 2, 1)
            self.put(name, self.tasks[name]._replace(batch=ask.batch))
        return answer

    def retry_blocked(self, name: Name, r: Record, ask: Retry) -> str:
        """Count an attempt of a blocked task, and give it another time."""
        token = ask.name or f"attempt:{self.attempt_of(r, ask)}"
        if any(token == known for known, _ in r.retries):
            return "duplicate"
        if ask.fence:
            return "lost"
        if r.fresh:
            self.add(name[0], "fresh", -1)
        changed = r._replace(
            attempt=r.attempt + 1,
            losses=0,
            prior=r.prior + ask.free,
            retries=r.retries | {(token, r.attempt)},
            at=self.now,
        )
        self.put(name, changed)
        self.delay(name, ask.at)
        self.add(name[0], "retried", 1)
        return "accepted"

    def refuse_rare(self, name: Name, task: Publish) -> str:
        """Return why a member of a batch is refused."""
        member = task.batch in self.batches and task.batch != text(name)
        closed = member and self.batches[task.batch][1]
        return "batch_closed" if closed else ""

    def publish_rare(self, name: Name, record: Record, task: Publish, at: int) -> None:
        """Store a task that waits for others or has a batch."""
        itself = task.batch == text(name)
        if task.batch and not itself:
            record = record._replace(batch=task.batch)
            self.count_member(task.batch, 2, 1)
        if task.after or itself:
            self.add(name[0], "fresh", -1)
            self.admit(name, record, task, at)
        elif at > self.now:
            self.schedule(name, record, at)
        else:
            self.make_available(name, record)

    def reschedule(self, name: Name, at: int) -> bool:
        """Give a task another time; a blocked one stays blocked."""
        r = self.tasks.get(name)
        upto, since = self.purging.get(name[0], (0, 0))
        purged = r is not None and r.seq <= upto and self.now < since + 60_000_000
        if r is None or r.state != "blocked" or purged:
            return super().reschedule(name, at)
        self.delay(name, at)
        return True

    def delay(self, name: Name, at: int) -> None:
        """Give a blocked task another time."""
        self.waits[name].time = at

    def admit(self, name: Name, r: Record, task: Publish, at: int) -> None:
        """Store a task that waits for others."""
        after = task.after or After()
        wait = Wait(after, self.next_number(), {}, number=len(after.parents), time=at)
        if task.batch == text(name):
            wait.batch, wait.counts = True, {}
        kept: dict[int, bytes] = {}
        away: list[str] = []
        for place, parent in enumerate(after.parents):
            wanted = place in after.inputs
            p, result = self.look_at(parent, f"{text(name)} {wait.entry} {'li' if wanted else 'l'}")
            if p is not None and not p.live and self.count_end(wait, parent, p.state):
                self.keep_input(wait, kept, parent, result)
                continue
            wait.missing[parent] = 0
            if p is None:
                away.append(parent)
        self.looked += len(after.parents)
        self.kept[name] = kept
        if wait.reason or wait.size > _INPUTS or wait.met:
            self.proceed(name, r, wait)
            return
        for parent in away:
            wanted = after.parents.index(parent) in after.inputs
            self.add_line(f"register {parent} {text(name)}", entry=str(wait.entry), wanted=wanted)
        self.waits[name] = wait
        self.put(
            name,
            r._replace(state="blocked", place="parked", seq=self.next_seq(name[0]), at=self.now),
        )
        self.add(name[0], "blocked", 1)
        self.add(name[0], "fresh", 1)

    def look_at(self, parent: str, child: str) -> tuple[Record | None, bytes]:
        """Return the record and the result of a parent, and note a child at it unless it has ended."""
        name = named(parent)
        r = self.tasks.get(name)
        if r is None or r.state == "replaced":
            return None, b""
        if r.state in OVER:
            wanted = r.state == "done" and child.endswith("i")
            kept, until = self.results.get(name, (None, 0)) if wanted else (None, 0)
            result = (kept or b"") if until > self.now else b""
            self.read += len(result)
            return r, result
        if self.is_later(parent, r):
            return None, b""
        self.children.setdefault(parent, set()).add(child)
        self.put(name, r._replace(parent=True))
        return r, b""

    def is_later(self, parent: str, r: Record | None) -> bool:
        """Return whether children of an earlier task with this name, which has ended, are still to be informed."""
        said = self.unreported.get(parent)
        live = r is not None and r.state not in OVER and not r.parent
        return live and said is not None and said.state not in STAYS

    def count_end(self, wait: Wait, parent: str, state: str) -> bool:
        """Count a change of a parent; return whether it is missing no longer."""
        wait.dead.discard(parent)
        if state == "alive":
            return False
        when = wait.after.when
        if state == "dead" and when == "done" and not wait.after.cancels:
            wait.dead.add(parent)
            return False
        wait.number -= 1
        ended = when == "done" and state != "done"
        ended = ended or (when == "failed" and state == "done" and not (wait.number or wait.failed))
        if state == "unknown":
            wait.reason = wait.reason or "unknown_parent"
        elif ended:
            wait.reason = wait.reason or "parent_ended"
        elif when == "failed" and state != "done":
            wait.failed = True
        return True

    def parents_of(self, name: Name) -> list[Any]:
        """Return what a blocked task waits for: what holds it, the number of parents that are shown, and of all."""
        wait = self.waits.get(name)
        if wait is None:
            return []
        number = len(wait.missing)
        return [sorted(wait.dead), min(20, number), number]

    def held_in(self, key: str) -> int:
        """Return the number of blocked tasks of a queue that dead letters hold."""
        return sum(bool(wait.dead) for name, wait in self.waits.items() if name[0] == key)

    def keep_input(self, wait: Wait, kept: dict[int, bytes], parent: str, result: bytes) -> None:
        """Keep the result of a parent, if the child wants it."""
        place = wait.after.parents.index(parent)
        if result and place in wait.after.inputs:
            wait.size += len(result)
            kept[wait.after.inputs.index(place)] = result

    def proceed(self, name: Name, r: Record, wait: Wait) -> None:
        """Do what follows when a task waits no longer."""
        if wait.reason:
            self.finish(name, r, "cancelled")
        elif wait.batch:
            self.finish(name, r, "done")
        elif wait.size > _INPUTS:
            self.kept.pop(name, None)
            self.bury(name, r)
        else:
            if wait.after.inputs:
                self.inputs[name] = len(wait.after.inputs)
            self.add(name[0], "fresh", int(r.fresh))
            if wait.time > self.now:
                self.schedule(name, r, wait.time)
            else:
                self.make_available(name, r)

    def go_on(self, name: Name, wait: Wait) -> None:
        """Let a blocked task go on, or end it."""
        self.waits.pop(name, None)
        self.read += max(self.size(name), 8192)
        self.proceed(name, self.withdraw(name, self.tasks[name]), wait)

    def inform(
        self, child: str, entry: str, parent: str, state: str, version: float, result: bytes
    ) -> None:
        """Report a change of a parent to a child."""
        name = named(child)
        wait = self.waits.get(name)
        if wait is None or str(wait.entry) != entry or version < wait.missing.get(parent, 1e99):
            return
        if not self.count_end(wait, parent, state):
            wait.missing[parent] = int(version)
            return
        del wait.missing[parent]
        self.keep_input(wait, self.kept[name], parent, result)
        if not (wait.reason or wait.size > _INPUTS or wait.met):
            return
        upto, since = self.purging.get(name[0], (0, 0))
        if self.tasks[name].seq <= upto and self.now < since + 60_000_000:
            self.purged = self.purged | {name[0]: self.purged.get(name[0], 0) + 1}
            self.end_live(name, self.tasks[name], "cancelled")
        else:
            self.go_on(name, wait)

    def inform_children(self, parent: str, state: str, result: bytes) -> None:
        """Inform some children of a parent, and write down what is left."""
        most = 0 if self.sated else min(AT_ONCE, self.left)
        if most == 0:
            self.unreported[parent] = Said(
                0, state=state, version=self.next_number(), result=result
            )
            return
        some = self.children_of(parent)[: most + 1]
        version = self.next_number() if state in STAYS or len(some) > most else 0
        rest, some = len(some) > most, some[:most]
        self.left -= len(some)
        self.drop(parent, state, some)
        for member in some:
            child, entry, kind = member.split(" ")
            told = result if kind.endswith("i") else b""
            if kind.startswith("l"):
                self.inform(child, entry, parent, state, version or 1e98, told)
            else:
                version = version or self.next_number()
                self.add_end(parent, member, state, version, told)
        if rest:
            last = some[-1] if state in STAYS else ""
            self.unreported[parent] = Said(
                0, state=state, version=version, result=result, last=last
            )

    def children_of(self, parent: str, after: str = "") -> list[str]:
        """Return the children of a parent in the order of the store."""
        return sorted(member for member in self.children.get(parent, ()) if member > after)

    def drop(self, parent: str, state: str, some: Sequence[str]) -> None:
        """Forget children of a parent that has ended."""
        if state not in STAYS:
            self.children.get(parent, set()).difference_update(some)

    def add_end(self, parent: str, member: str, state: str, version: int, result: bytes) -> None:
        """Write the line that reports a change of a parent to a child."""
        child, entry, kind = member.split(" ")
        result = result if kind.endswith("i") else b""
        self.read += len(result)
        self.add_line(
            f"end {parent} {child}", entry=entry, state=state, version=version, result=result
        )
