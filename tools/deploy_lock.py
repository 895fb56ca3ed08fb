"""Write deploy/requirements.lock and deploy/build.lock: the packages of an image, pinned as in requirements.lock.

An image contains neither the development tools nor Spark. With --check, only report whether the files are up to date.
The dependencies are read from the metadata of the packages installed here; versions and hashes are copied from
requirements.lock.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
OURS = "taskqueue-backends"
WANTED = {"requirements.lock": [f"{OURS}[cli,redis]"], "build.lock": ["hatchling"]}
IMAGE = {
    "sys_platform": "linux",
    "platform_system": "Linux",
    "os_name": "posix",
    "python_version": "3.13",
    "python_full_version": "3.13.0",
}
"""values of the environment markers in the image"""


def requires(name: str, extra: str) -> Iterator[Requirement]:
    """Yield the requirements of a package for an extra. Those of this project are read from pyproject.toml."""
    if name == OURS:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        extras = project["optional-dependencies"]
        yield from map(Requirement, extras[extra] if extra else project["dependencies"])
        return
    for text in distribution(name).requires or ():
        inner = Requirement(text)
        if inner.marker is None or inner.marker.evaluate({**IMAGE, "extra": extra}):
            yield inner


def needed(roots: Iterable[str]) -> set[str]:
    """Return the names of all direct and indirect requirements on Linux, without packages of this project."""
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        for extra in ("", *one.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            waiting += requires(name, extra)
    return {name for name, _ in found} - {OURS}


def blocks(lock: str) -> Iterator[tuple[str, str]]:
    """Yield each package of a lock file with its lines."""
    for block in re.split(r"\n(?=\S)", lock.strip()):
        yield canonicalize_name(re.split(r"[=\[ ;]", block, maxsplit=1)[0]), block


def locks() -> Iterator[tuple[Path, str]]:
    """Yield the path and the correct content of each file."""
    known = dict(blocks(LOCK.read_text("utf-8")))
    for file, roots in WANTED.items():
        names = needed(roots) & known.keys()
        missing = needed(roots) - known.keys()
        if missing:
            sys.exit(f"requirements.lock has no {', '.join(sorted(missing))}: python3 dev.py lock")
        text = "".join(f"{known[name]}\n" for name in sorted(names))
        yield ROOT / "deploy" / file, text


def main(arguments: list[str]) -> int:
    """Write the files; with --check, return 1 if a file is out of date."""
    stale = [(p, text) for p, text in locks() if not p.exists() or p.read_text("utf-8") != text]
    for path, text in stale:
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)} is old: python tools/deploy_lock.py")
        else:
            path.write_text(text, "utf-8")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
