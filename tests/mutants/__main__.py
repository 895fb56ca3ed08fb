"""Mutation testing: make small mistakes in the product, one at a time, and count how many the tests notice.

python3 dev.py mutants [SUITE ...] [--sample N] [--seed S] [--all] [--name TEXT] [--json FILE]
                              [--before FILE] [--processes N]
python3 dev.py mutants --compare BEFORE AFTER
python3 dev.py mutants --coverage [SUITE ...] [--json FILE] [--processes N]
python3 dev.py mutants --quick

The suites are protocol, memory, redis, lua, slots, server, worker, dispatcher, prefect and pipeline; by default all of
them are tried. Of each suite, a sample of 200 mutants is tried. It depends only on the sources and the seed, so that
runs before and after a change of the tests try the same mutants. --json writes the verdicts to a file; if the file has
verdicts for the same sources and tests already, the run continues from there. With --before, a mutant caught by that
earlier run is tried first with the test that failed then. If this test passes now, all tests of the changed line run,
so that a mutant counts as lost only because of the tests, not because of their order or duration. --compare prints
which mutants were caught before and after, and which are no longer caught. Its exit code is 1 if an area catches fewer
mutants or covers fewer branches (see --coverage).

Each test of an area, also one marked long, first runs once without a mutant; a test slower than 4 seconds is not used.
For each mutant, a forked process replaces the code of the changed function and runs the tests that execute the changed
line, fastest first: at most 40 tests and 6 seconds in total. If the code runs at import, its modules are imported
again. A mutant is caught if a test fails, or takes five times as long, and passes again without the mutant.
Mutants take effect only in this process, not in other processes that tests start: server processes, Python workers of
Spark, a real Prefect. Their lines count as uncovered unless a test also runs them in this process. Not mutated for
this reason are the demos, the program of the GPU component, and the main process of a server with several processes.
In taskqueue_prefect this applies to most code that needs Prefect: runs, workers, scheduling, the collection.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

from tests.mutants.area import try_mutants
from tests.mutants.branches import measure
from tests.mutants.changes import Mutant, mutants_of
from tests.mutants.copies import ROOT
from tests.mutants.forks import Fork
from tests.mutants.suites import QUICK, QUICK_TESTS, SUITES, sample_of
from tests.mutants.trial import Verdict
from tests.mutants.verdicts import Run, caught_in, compare, table

_SAMPLE = 200
_ACCEPTED = Path(__file__).with_name("accepted.toml")


def accepted() -> dict[str, str]:
    """Return the names of the mutants that behave like the original, with the reason."""
    return {one["name"]: one["why"] for one in tomllib.loads(_ACCEPTED.read_text())["mutant"]}


def main(arguments: list[str]) -> int:
    """Run the command with these arguments, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="dev.py mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("suites", nargs="*", default=[], help=", ".join(SUITES))
    parser.add_argument("--sample", type=int, default=_SAMPLE, help="mutants of each suite")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--name", default="", help="only mutants whose name has this text, of all")
    parser.add_argument("--json", type=Path, help="where the verdicts are kept")
    parser.add_argument(
        "--before", type=Path, help="what this run caught is looked at more closely"
    )
    parser.add_argument("--processes", type=int, default=1, help="areas at the same time")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--coverage", action="store_true", help="covered branches by area")
    parser.add_argument("--quick", action="store_true", help="a dozen, which must be killed")
    options = parser.parse_args(arguments)
    if options.compare:
        before, after = options.compare
        return compare(before, after, _say)
    if unknown := [name for name in options.suites if name not in SUITES]:
        parser.error(f"no such suite: {', '.join(unknown)}; there are {', '.join(SUITES)}")
    os.nice(10)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(options.json, options.sample, options.seed)
    if options.coverage:
        suites = {name: SUITES[name] for name in options.suites or SUITES}
        found = measure(suites, options.processes, _say, everything=not options.suites)
        for line in run.cover(found):
            _say(line)
        return 0
    if options.quick:
        return _quick(run)
    known = accepted()
    caught = caught_in(options.before)
    areas: dict[tuple[str, ...], dict[str, list[Mutant]]] = defaultdict(dict)
    for name in options.suites or SUITES:
        suite = SUITES[name]
        every = [
            one
            for path in suite.paths(ROOT)
            for one in mutants_of(ROOT, path)
            if one.name not in known
        ]
        named = [one for one in every if options.name in one.name]
        chosen = (
            named if options.all or options.name else sample_of(every, options.sample, options.seed)
        )
        areas[suite.tests][name] = run.left(name, suite.digest(ROOT), chosen, caught)
    wanted = {tests: suites for tests, suites in areas.items() if any(suites.values())}
    code = _try(wanted, run, options.processes, caught)
    for line in table(run.verdicts):
        _say(line)
    return code


def _quick(run: Run) -> int:
    """Try the mutants of `QUICK`; return 1 unless tests notice all of them.

    Raises `KeyError` if one no longer exists.
    """
    mutants = []
    for path, names in QUICK.items():
        known = {one.name: one for one in mutants_of(ROOT, path)}
        mutants += [known[f"{path}: {name}"] for name in names]
    code = _try({QUICK_TESTS: {"quick": mutants}}, run, 1, {})
    verdicts = run.verdicts.get("quick", [])
    _say(f"{sum(one.caught for one in verdicts)} of {len(mutants)} killed")
    return code or int(sum(one.caught for one in verdicts) < len(mutants))


def _try(
    areas: Mapping[tuple[str, ...], Mapping[str, Sequence[Mutant]]],
    run: Run,
    processes: int,
    caught: Mapping[str, str],
) -> int:
    """Try the mutants of every area, several areas at the same time; return 1 if some could not be tried."""
    left = list(areas.items())
    missing = sum(len(mutants) for suites in areas.values() for mutants in suites.values())
    active: list[Fork] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        try:
            while left or active:
                while left and len(active) < processes:
                    tests, suites = left.pop(0)
                    own = Path(folder, str(len(left)))
                    active.append(Fork(partial(try_mutants, own, tests, suites, caught)))
                for pipe in wait([one.pipe for one in active]):
                    fork = next(one for one in active if one.pipe is pipe)
                    match fork.next(None):
                        case ("verdict", suite, Verdict() as verdict):
                            missing -= 1
                            run.add(suite, verdict)
                            if not verdict.caught:
                                _say(f"{verdict.outcome}: {suite}: {_place(verdict)}")
                        case ("note", text):
                            _say(text)
                        case None:
                            fork.__exit__()
                            active.remove(fork)
        finally:
            for fork in active:
                fork.__exit__()
    if missing:
        _say(f"{missing} mutants were not tried: run the same command again")
    return int(missing > 0)


def _place(verdict: Verdict) -> str:
    return f"line {verdict.line} of {verdict.name}"


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the output of a command


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
