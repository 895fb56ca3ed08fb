"""Tests that kill, freeze and cut off processes, and seeded campaigns.

python3 dev.py chaos [--seeds N] [--minutes M] [--jobs J] [--menu NAME] [--seed S] [arguments of pytest]
python3 dev.py chaos --outages
python3 dev.py chaos --durability [RUNS]
python3 dev.py chaos --fairness [TASKS]
python3 dev.py chaos --workflows [SEEDS] [--menu NAME] [--jobs J]

Without options: all tests marked chaos, then a campaign of 20 seeds. With --seeds or --minutes: only such a
campaign. A campaign continues after the last seed of the previous one, adds its results to the totals in
tests/chaos/results/ and writes the totals into docs/reliability.md. With --seed: only the run with this seed.
With --outages: the long outages, about ten minutes. With --durability: the losses of each durability class, about
twenty minutes. With --fairness: one tenant with a million tasks next to 99 tenants with ten, some minutes.
With --workflows: workflows and schedules under each kind of fault of theirs, 20 seeds each, about an hour.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from tests.chaos import durability, fairness, flows, outages
from tests.chaos.render import BLOCKS, put, render
from tests.chaos.rules_jobs import JobFigures
from tests.chaos.rules_jobs import describe as describe_jobs
from tests.chaos.seeded import Report, carry_out, scenario
from tests.chaos.totals import add_regression, read_totals, reset, updated
from tests.redis.engines import find_engine

_SEEDS = 20
_CUTS = 50
_MAX_TASKS_PER_CHILD = 25


def main(arguments: list[str]) -> int:
    """Run what the arguments ask for; return 1 if anything failed, otherwise 0."""
    parser = argparse.ArgumentParser(
        prog="dev.py chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, help="how many seeds")
    parser.add_argument("--minutes", type=float, help="how long at most")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (2)")
    parser.add_argument("--menu", help="faults of this menu only")
    parser.add_argument("--seed", type=int, help="this one run, without counting it")
    parser.add_argument("--reset", action="store_true", help="begin the totals anew")
    parser.add_argument("--outages", action="store_true", help="outages of up to five minutes")
    parser.add_argument(
        "--durability", type=int, nargs="?", const=_CUTS, metavar="RUNS",
        help=f"what is lost in so many cuts of each kind ({_CUTS})",
    )  # fmt: skip
    parser.add_argument(
        "--fairness", type=int, nargs="?", const=fairness.MANY, metavar="TASKS",
        help=f"how long tenants wait beside one that has so many tasks ({fairness.MANY:,})",
    )  # fmt: skip
    parser.add_argument(
        "--workflows", type=int, nargs="?", const=flows.SEEDS, metavar="SEEDS",
        help=f"workflows and schedules under faults, so many seeds of each kind ({flows.SEEDS})",
    )  # fmt: skip
    options, rest = parser.parse_known_args(arguments)
    if options.seed is not None:
        report = carry_out(scenario(options.seed, options.menu))
        print(report, report.figures, "ok" if report.ok else "FAILED", sep="\n")  # noqa: T201 - a command
        return 0 if report.ok else 1
    if options.outages or options.durability or options.fairness or options.workflows:
        return _measure(options)
    if rest or (options.seeds is None and options.minutes is None):
        words = [sys.executable, "-m", "pytest", "-m", "chaos", "tests", *rest]
        code = subprocess.run(words, check=False).returncode
        if code:
            return code
    if options.reset:
        reset()
    return _campaign(options)


def _measure(options: argparse.Namespace) -> int:
    bad = 0
    if options.outages:
        for suffered in outages.campaign(options.jobs):
            bad += bool(suffered.problems)
            print(suffered.outage, *(suffered.problems or ["ok"]), sep="\n  ", flush=True)  # noqa: T201 - a command
        _publish("chaos --outages")
    if options.durability:
        for measured in durability.campaign(options.durability, options.jobs):
            line = f"{measured.case.durability}, {measured.happened}: {measured.lost} of {measured.confirmed} lost"
            print(line, flush=True)  # noqa: T201 - a command
        _publish("chaos --durability")
    if options.fairness:
        bad += not fairness.campaign(options.fairness).ok
        _publish("chaos --fairness")
    if options.workflows:
        kinds = [options.menu] if options.menu else []
        for report in flows.campaign(options.workflows, options.jobs, kinds):
            if not report.ok:
                bad += 1
                print(f"\nFAILED {report}\n", flush=True)  # noqa: T201 - a command
            print(_line(report), flush=True)  # noqa: T201 - a command
        _publish("chaos --workflows")
    return 1 if bad else 0


def _publish(command: str) -> None:
    page, table = BLOCKS[command]
    put(command, page, table())
    print(table())  # noqa: T201 - a command


def _campaign(options: argparse.Namespace) -> int:
    seeds = options.seeds if options.seeds is not None else 10**9 if options.minutes else _SEEDS
    end = time.monotonic() + (options.minutes or 10**6) * 60
    bad = 0
    redis = str(find_engine()).partition(" (")[0]
    jobs: list[JobFigures] = []
    for report in _reports(seeds, end, options.jobs, options.menu):
        with updated() as totals:
            totals.add(report, redis)
        if not report.ok:
            bad += 1
            add_regression(report)
            print(f"\nFAILED {report}\n", flush=True)  # noqa: T201 - a command
        print(_line(report), flush=True)  # noqa: T201 - a command
        if report.figures.jobs.runs:
            jobs.append(report.figures.jobs)
    render()
    totals = read_totals()
    print(  # noqa: T201 - a command
        f"In all: {totals.runs} runs, {totals.tasks} tasks, {sum(totals.faults.values())} faults, "
        f"{totals.lost} lost, {len(totals.failed)} failed."
    )
    if jobs:
        print(describe_jobs(jobs))  # noqa: T201 - a command
    return 1 if bad else 0


def _line(report: Report) -> str:
    figures = report.figures
    return (
        f"seed {report.scenario.seed:5} {report.scenario.menu:<10} {report.wall:5.1f} s "
        f"{figures.tasks:5} tasks, {sum(figures.faults.values()):2} faults, {figures.duplicates:3} duplicates of "
        f"{figures.held:3} held, recovery {figures.recovery.worst:5.2f} s  {'ok' if report.ok else 'FAILED'}"
    )


def _reports(seeds: int, end: float, jobs: int, menu: str | None) -> Iterator[Report]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        jobs, mp_context=context, max_tasks_per_child=_MAX_TASKS_PER_CHILD
    ) as pool:
        running: set[Future[Report]] = set()
        begun = 0
        try:
            while running or (begun < seeds and time.monotonic() < end):
                while begun < seeds and len(running) < jobs and time.monotonic() < end:
                    with updated() as totals:
                        seed, totals.next_seed = totals.next_seed, totals.next_seed + 1
                    running.add(pool.submit(carry_out, scenario(seed, menu)))
                    begun += 1
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for one in done:
                    yield one.result()
        finally:
            for one in running:
                one.cancel()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
