"""Check that the lock files contain only pins, and that they agree with pyproject.toml.

Every line must be a pin with hashes, so that no index, address, path or option of the machine that created the file is
in it. Every direct dependency must be pinned to a version within the bounds of pyproject.toml.
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


LOCK = "requirements.lock"
OTHERS = {"prefect": "tests/prefect/requirements.txt"}
"""extras that have a lock file of their own"""
PROGRAMS = "tests/binaries/requirements.txt"
"""lock file of the programs that only the tests run"""


def impurities(lock: str, name: str = LOCK) -> Iterator[str]:
    """Yield a message for each line that is neither a pin followed by hashes nor a hash."""
    for number, line in enumerate(lock.splitlines(), start=1):
        if not PIN.fullmatch(line) and not HASH.fullmatch(line):
            yield f"{name}:{number}: not a pin with hashes: {line}"


def misfits(lock: str, project: str, extra: str | None = None) -> Iterator[str]:
    """Yield a message for each direct dependency that is not pinned within its bounds.

    With ``extra``, only the dependencies of this extra are checked; without it, all others.
    """
    pins: dict[str, list[str]] = {}
    for line in lock.splitlines():
        if pin := PIN.fullmatch(line):
            pins.setdefault(pin[1], []).append(pin[2])
    table = tomllib.loads(project)
    own = canonicalize_name(table["project"]["name"])
    wanted = list(table["project"]["dependencies"])
    for group in ("optional-dependencies", "dependency-groups"):
        for name, requirements in (table["project"] | table).get(group, {}).items():
            if name == extra or (extra is None and name not in OTHERS):
                wanted += requirements
    for requirement in map(Requirement, dict.fromkeys(wanted)):
        name = canonicalize_name(requirement.name)
        versions = pins.get(name, [])
        if name != own and not (versions and all(v in requirement.specifier for v in versions)):
            yield f"{requirement} does not fit the lock: run `python3 dev.py lock`"


def main(root: Path = ROOT) -> int:
    """Print all problems; return 1 if there are any."""
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    problems = [*impurities((root / PROGRAMS).read_text(encoding="utf-8"), PROGRAMS)]
    for extra, name in [(None, LOCK), *OTHERS.items()]:
        lock = (root / name).read_text(encoding="utf-8")
        problems += [*impurities(lock, name), *misfits(lock, project, extra)]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
