"""Storing the verdicts of a run in a file, and comparing two runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tests.mutants.branches import Branches
from tests.mutants.changes import Mutant
from tests.mutants.copies import ROOT
from tests.mutants.trial import Verdict


class _Area(msgspec.Struct):
    digest: str
    """digest of the sources and tests to which the verdicts apply"""
    verdicts: list[Verdict]


class _Kept(msgspec.Struct):
    sample: int = 0
    seed: int = 0
    areas: dict[str, _Area] = msgspec.field(default_factory=dict)
    branches: dict[str, dict[str, Branches]] = msgspec.field(default_factory=dict)


class Run:
    """The verdicts of one run, which are written to a file one by one."""

    def __init__(self, path: Path | None, sample: int, seed: int) -> None:
        self._path = path
        self._kept = _Kept(sample, seed)
        if path is not None and path.exists():
            before = _read(path)
            self._kept.branches = before.branches
            if (before.sample, before.seed) == (sample, seed):
                self._kept.areas = before.areas

    @property
    def verdicts(self) -> dict[str, list[Verdict]]:
        """The verdicts by suite, including those of an earlier run in the same file."""
        return {name: area.verdicts for name, area in self._kept.areas.items()}

    def left(
        self, suite: str, digest: str, mutants: Sequence[Mutant], caught: Mapping[str, str]
    ) -> list[Mutant]:
        """Return the mutants still to be tried: those without a verdict, and those missed now but caught earlier.

        Verdicts for other sources or tests do not count.
        """
        area = self._kept.areas.setdefault(suite, _Area(digest, []))
        if area.digest != digest:
            area = self._kept.areas[suite] = _Area(digest, [])
        area.verdicts = [
            one for one in area.verdicts if one.caught or caught_by(caught, one) is None
        ]
        known = {verdict.name for verdict in area.verdicts}
        return [mutant for mutant in mutants if mutant.name not in known]

    def add(self, suite: str, verdict: Verdict) -> None:
        """Add a verdict and write the file."""
        self._kept.areas.setdefault(suite, _Area("", [])).verdicts.append(verdict)
        self._write()

    def cover(self, branches: dict[str, dict[str, Branches]]) -> list[str]:
        """Store the branch coverage of some areas; return a line of text for each."""
        self._kept.branches |= branches
        self._write()
        return [f"{name}: {_taken(files)} branches are taken" for name, files in branches.items()]

    def _write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_name(f"{self._path.name}.new")
            fresh.write_bytes(msgspec.json.format(msgspec.json.encode(self._kept)))
            fresh.replace(self._path)


def caught_in(path: Path | None) -> dict[str, str]:
    """Return the mutants that an earlier run caught, each with the test that caught it.

    The keys are names, or identities if the file of a mutant no longer exists.
    """
    areas = _read(path).areas.values() if path is not None else ()
    return {
        one.name if (ROOT / one.name.partition(": ")[0]).exists() else one.identity: one.test
        for area in areas
        for one in area.verdicts
        if one.caught
    }


def caught_by(known: Mapping[str, str], mutant: Mutant | Verdict) -> str | None:
    """Return the test that caught a mutant in an earlier run, or None."""
    return known.get(mutant.name, known.get(mutant.identity))


def _read(path: Path) -> _Kept:
    return msgspec.json.decode(path.read_bytes(), type=_Kept)


def table(verdicts: Mapping[str, Sequence[Verdict]]) -> Iterator[str]:
    """Yield the lines of a Markdown table with one row per suite."""
    yield "| suite | mutants | caught | survived | uncovered | share | seconds |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, found in verdicts.items():
        count = Counter(one.outcome for one in found)
        caught = count["killed"] + count["hung"]
        seconds = sum(one.seconds for one in found)
        yield (
            f"| {name} | {len(found)} | {caught} | {count['survived']} | {count['uncovered']} "
            f"| {caught / max(1, len(found)):.0%} | {seconds:.0f} |"
        )


def compare(before: Path, after: Path, say: Callable[[str], None]) -> int:
    """Print a comparison of two runs and each mutant no longer caught; return 1 if an area got worse."""
    old, new = _read(before), _read(after)
    if (old.sample, old.seed) != (new.sample, new.seed):
        say(
            "these runs cannot be compared: their samples or seeds differ; run both with the same --sample and --seed"
        )
        return 1
    worse = False
    say(
        "| suite | before: caught / planted | after: caught / planted | the same mutants before | after |"
    )
    say("| --- | --- | --- | --- | --- |")
    lost: list[str] = []
    for name, area in old.areas.items():
        found = new.areas.get(name, _Area("", [])).verdicts
        pairs = list(_pairs(area.verdicts, found))
        was, now = sum(one.caught for one, _ in pairs), sum(one.caught for _, one in pairs)
        lost += [
            f"caught before, by {one.test}, and not after: {name}: line {other.line} of {other.name}"
            for one, other in pairs
            if one.caught and not other.caught
        ]
        worse |= now < was or not pairs
        say(
            f"| {name} | {_share(area.verdicts)} | {_share(found)} | {was} of {len(pairs)} | {now} |"
        )
    for line in lost:
        say(line)
    for name, files in old.branches.items():
        others = new.branches.get(name, {})
        worse |= _taken_share(others) < _taken_share(files)
        say(f"branches of {name}: {_taken(files)} before, {_taken(others)} after")
        for path, file in files.items():
            other = others.get(path)
            if other is not None and other.all == file.all:
                for first, last in sorted(set(other.missing) - set(file.missing)):
                    say(f"taken before and not after: {path}, from line {first} to {last}")
    return int(worse)


def _taken_share(files: Mapping[str, Branches]) -> float:
    missing = sum(len(file.missing) for file in files.values())
    return 1 - missing / max(1, sum(file.all for file in files.values())) if files else 0.0


def _taken(files: Mapping[str, Branches]) -> str:
    every = sum(file.all for file in files.values())
    return f"{every - sum(len(file.missing) for file in files.values())} of {every}"


def _share(verdicts: Sequence[Verdict]) -> str:
    return f"{sum(one.caught for one in verdicts)} / {len(verdicts)}"


def _pairs(
    before: Sequence[Verdict], after: Sequence[Verdict]
) -> Iterator[tuple[Verdict, Verdict]]:
    """Yield the two verdicts of each mutant tried in both runs, also if its file was renamed in between."""
    names = {one.name: one for one in after}
    others: dict[str, list[Verdict]] = defaultdict(list)
    known = {one.name for one in before}
    for one in after:
        if one.name not in known:
            others[one.identity].append(one)
    for one in before:
        if one.name in names:
            yield one, names[one.name]
        elif others[one.identity]:
            yield one, others[one.identity].pop(0)
