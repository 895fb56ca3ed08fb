"""Puts small mistakes into the product, one at a time, and counts how many of them the tests notice.

python3 dev.py mutants [SUITE ...] [--sample N] [--seed S] [--all] [--json FILE]
python3 dev.py mutants --quick

Suites are protocol, memory, redis, lua and slots; without any, all of them. Of each, a sample of 60 mutants is tried
unless --sample or --all says otherwise. What survives and is not accepted in tests/mutants/accepted.toml is listed,
and less than 90 % killed is a failure. With --quick a dozen that must all be killed are tried, as every test run does.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.mutants.changes import Mutant, mutants_of
from tests.mutants.suites import QUICK, SUITES, Suite
from tests.mutants.trial import ROOT, Copy, Verdict

_SAMPLE = 60
_TARGET = 0.9
_ACCEPTED = Path(__file__).with_name("accepted.toml")


def accepted() -> dict[str, str]:
    """Return the mutants that make no difference, by name, and why that is so."""
    return {one["name"]: one["why"] for one in tomllib.loads(_ACCEPTED.read_text())["mutant"]}


def main(arguments: list[str]) -> int:
    """Try what was asked for; 1 if too many survive."""
    parser = argparse.ArgumentParser(
        prog="dev.py mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("suites", nargs="*", default=[], help=", ".join(SUITES))
    parser.add_argument("--sample", type=int, default=_SAMPLE, help="mutants of each suite")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--json", type=Path, help="where the verdicts go")
    parser.add_argument("--quick", action="store_true", help="a dozen, which must be killed")
    options = parser.parse_args(arguments)
    os.nice(10)
    with tempfile.TemporaryDirectory(prefix="taskqueue-mutants-") as folder:
        copy = Copy(Path(folder))
        if options.quick:
            return _quickly(copy)
        found: dict[str, list[Verdict]] = {}
        for name in options.suites or SUITES:
            suite = SUITES[name]
            some = _chosen(suite, None if options.all else options.sample, options.seed)
            found[name] = []
            for verdict in _try(copy, name, suite, some):
                found[name].append(verdict)
                if options.json:
                    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return _tell(found)


def _quickly(copy: Copy) -> int:
    """Try the few that are named; 1 unless the tests notice every one. Raises `KeyError` for one that is no more."""
    verdicts = []
    for (path, test), names in QUICK.items():
        known = {one.name: one for one in mutants_of(ROOT, path)}
        verdicts += [copy.attempt(known[f"{path}: {name}"], [test], 60) for name in names]
    for one in verdicts:
        if not one.killed:
            _say(f"survived: line {one.line} of {one.name}")
    _say(f"{sum(one.killed for one in verdicts)} of {len(verdicts)} killed")
    return 0 if all(one.killed for one in verdicts) else 1


def _open(path: str) -> list[Mutant]:
    known = accepted()
    return [one for one in mutants_of(ROOT, path) if one.name not in known]


def _chosen(suite: Suite, sample: int | None, seed: int) -> list[Mutant]:
    every = [one for path in suite.paths(ROOT) for one in _open(path)]
    if sample is None or sample >= len(every):
        return every
    chosen = random.Random(seed).sample(range(len(every)), sample)
    return [every[n] for n in sorted(chosen)]


def _try(copy: Copy, name: str, suite: Suite, mutants: list[Mutant]) -> Iterator[Verdict]:
    began = time.monotonic()
    if copy.run(suite.tests, suite.seconds * 3) != 0:
        sys.exit(f"the tests of {name} fail without any mutant:\n{copy.output()[-3000:]}")
    # Not much longer than without: what runs on and on has been noticed.
    seconds = min(suite.seconds, 20 + 4 * (time.monotonic() - began))
    for mutant in mutants:
        verdict = copy.attempt(mutant, suite.tests, seconds)
        if not verdict.killed:
            _say(f"survived: line {mutant.line} of {mutant.name}")
        yield verdict


def _tell(found: dict[str, list[Verdict]]) -> int:
    _say("| suite | mutants | killed | survived | share | seconds |")
    _say("| --- | --- | --- | --- | --- | --- |")
    worst = 1.0
    for name, verdicts in found.items():
        killed = sum(one.killed for one in verdicts)
        share = killed / max(1, len(verdicts))
        worst = min(worst, share)
        seconds = sum(one.seconds for one in verdicts)
        _say(
            f"| {name} | {len(verdicts)} | {killed} | {len(verdicts) - killed} | {share:.0%} | {seconds:.0f} |"
        )
    return 0 if worst >= _TARGET else 1


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - a command


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
