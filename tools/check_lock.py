"""Checks that requirements.lock is pure, and that it fits pyproject.toml.

Pure: every line is a pin with hashes and nothing else, so no index, address, path or option of
the machine that solved it can be in there. Fits: every direct dependency is pinned within bounds.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PIN = re.compile(r"([a-z0-9-]+)==([A-Za-z0-9.+!]+)( ; [^:/\\@#]+)? \\")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


def impurities(lock: str) -> Iterator[str]:
    """Names each line that is neither a pin followed by hashes nor a hash."""
    for number, line in enumerate(lock.splitlines(), start=1):
        if not PIN.fullmatch(line) and not HASH.fullmatch(line):
            yield f"requirements.lock:{number}: not a pin with hashes: {line}"


def misfits(lock: str, project: str) -> Iterator[str]:
    """Names each direct dependency that the lock does not pin within its bounds."""
    pins: dict[str, list[str]] = {}
    for line in lock.splitlines():
        if pin := PIN.fullmatch(line):
            pins.setdefault(pin[1], []).append(pin[2])
    table = tomllib.loads(project)
    own = canonicalize_name(table["project"]["name"])
    wanted = list(table["project"]["dependencies"])
    for group in ("optional-dependencies", "dependency-groups"):
        for requirements in (table["project"] | table).get(group, {}).values():
            wanted += requirements
    for requirement in map(Requirement, dict.fromkeys(wanted)):
        name = canonicalize_name(requirement.name)
        versions = pins.get(name, [])
        if name != own and not (versions and all(v in requirement.specifier for v in versions)):
            yield f"{requirement} does not fit the lock: run `python3 dev.py lock`"


def main(root: Path = ROOT) -> int:
    """Prints what is wrong; 1 if anything is."""
    lock = (root / "requirements.lock").read_text(encoding="utf-8")
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    problems = [*impurities(lock), *misfits(lock, project)]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
