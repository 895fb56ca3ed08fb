"""The scripts that carry lines between partitions, in the specification."""

from __future__ import annotations

from typing import Any

from tests.model.books import Name
from tests.model.kin import named
from tests.model.waits import AT_ONCE, STAYS, Waits

_STATES = ("unknown", "alive", "", "done", "dead", "expired", "cancelled", "discarded")
"""what is reported to children, by number"""


class Lines(Waits):
    """The scripts for tasks that wait for others."""

    def on_after_lines(self, words: list[bytes], _: Any) -> Any:
        """Return lines of the outbox."""
        limit, after = int(words[0]), int(words[1] or 0)
        left = limit if len(self.lines) < 10_000 else 0
        for parent in sorted(self.unreported, key=lambda p: (self.unreported[p].version, p))[
            :AT_ONCE
        ]:
            if left <= 0 or self.sated:
                break
            said = self.unreported[parent]
            most = min(left, AT_ONCE if said.result else limit)
            some = self.children_of(parent, said.last)[:most]
            for member in some:
                self.add_end(parent, member, said.state, said.version, said.result)
            left -= len(some)
            self.drop(parent, said.state, some)
            if len(some) < most:
                del self.unreported[parent]
            elif said.state in STAYS:
                said.last = some[-1]
        self.read = 0
        page: list[Any] = []
        ordered = sorted((said.number, name) for name, said in self.lines.items())
        ordered = [pair for pair in ordered if pair[0] > after]
        while ordered and len(page) < limit and not self.sated:
            number = min(limit - len(page), AT_ONCE)
            some_lines, ordered = ordered[:number], ordered[number:]
            for _, name in some_lines:
                self.read += len(self.lines[name].result)
                page.append(self.line(name))
        return page

    def line(self, name: str) -> list[Any]:
        """Return a line in the form of the script's answer, without the counts of a batch but those of a line count."""
        said, state = self.lines[name], 0
        if said.state:
            state = _STATES.index(said.state)
        version, *counts = said.counts or (said.version, 0, 0, 0, 0, 0)
        shown = [
            str(said.number),
            *name.split(" "),
            said.entry,
            "1" if said.wanted else "",
            state,
            str(version),
        ]
        return [*shown, said.result, counts]

    def on_after_confirm(self, words: list[bytes], _: Any) -> Any:
        """Delete lines that were carried."""
        for number, name in zip(words[::2], words[1::2], strict=True):
            said = self.lines.get(name.decode())
            if said is not None and str(said.number) == number.decode():
                del self.lines[name.decode()]
        return "ok"

    def on_after_register(self, words: list[bytes], _: Any) -> Any:
        """Note children at their parents."""
        version, told = self.next_number(), list[Any]()
        for n in range(0, len(words), 4):
            if self.sated:
                break
            parent, child, entry, wanted = (word.decode() for word in words[n : n + 4])
            note = f"{child} {entry} {'fi' if wanted == '1' else 'f'}"
            r, result = self.look_at(parent, note)
            said = self.lines.get(f"end {parent} {child}")
            if said is None or said.entry != entry:
                noted = note in self.children.get(parent, ())
                said = self.unreported.get(parent) if noted else None
            if r is not None:
                told.append([10 if r.owner else _number(r.state), result, version])
            elif said is not None:
                result = said.result if wanted == "1" else b""
                told.append([_STATES.index(said.state), result, said.version])
            else:
                later = self.is_later(parent, self.tasks.get(named(parent)))
                told.append([11 * later, b"", version])
            self.read += len(told[-1][1])
        return told

    def on_after_release(self, words: list[bytes], _: Any) -> Any:
        """Report changes of parents to their children."""
        read = 0
        for n in range(0, len(words), 6):
            if self.sated:
                break
            child, entry, parent, state, version = (word.decode() for word in words[n : n + 5])
            self.inform(child, entry, parent, _STATES[int(state)], int(version), words[n + 5])
            read += 1
        return read

    def on_after_close(self, words: list[bytes], _: Any) -> Any:
        """Write the line that closes a batch."""
        wait = self.waits.get(named(words[0].decode()))
        if wait is None or wait.counts is None:
            return 0
        if not wait.sealed:
            self.add_line(f"close {words[0].decode()} -")
        return 1

    def on_after_seal(self, words: list[bytes], answer: Any) -> Any:
        """Close a batch in this partition. The name of the partition is taken from the answer."""
        count = self.batches.setdefault(words[0].decode(), [0] * 6)
        if not count[1]:
            count[:2] = self.next_number(), 1
        return [[answer[0][0], str(count[0]), *count[1:]]]

    def on_after_tally(self, words: list[bytes], _: Any) -> Any:
        """Keep counts of batches."""
        sealed, touched = words[0] == b"1", dict[str, None]()
        for n in range(1, len(words), 8):
            batch, partition, *numbers = (word.decode() for word in words[n : n + 8])
            wait = self.waits.get(named(batch))
            if wait is not None and wait.counts is not None:
                touched.setdefault(batch)
                wait.sealed = wait.sealed or sealed
                if wait.counts.get(partition, (0,))[0] < int(numbers[0]):
                    wait.counts[partition] = tuple(map(int, numbers))
        for batch in touched:
            self.end_batch(named(batch))
        return "ok"

    def end_batch(self, name: Name) -> None:
        """End a batch if all of its members have ended."""
        wait = self.waits[name]
        counts = tuple((wait.counts or {}).values())
        if wait.sealed and all(c[1] and c[2] == c[3] + c[4] for c in counts):
            wait.counts = None
            if any(c[4] for c in counts):
                wait.reason = "parent_ended"
            if wait.reason or wait.met:
                self.go_on(name, wait)


def _number(state: str) -> int:
    numbers = (
        "",
        "waiting",
        "scheduled",
        "done",
        "dead",
        "expired",
        "cancelled",
        "discarded",
        "",
        "blocked",
    )
    return numbers.index(state)
