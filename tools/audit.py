"""Look for known vulnerabilities of all locked packages, on every platform and for every supported Python.

Arguments are passed to pip-audit, which asks an advisory service on the internet. The exit code is 1 if a package is
vulnerable, or could not be audited.
"""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.check_lock import LOCK, OTHERS, PIN, PROGRAMS

ROOT = Path(__file__).parent.parent


def pins(root: Path) -> list[dict[str, str]]:
    """Return the versions of all locked packages by name, in as many groups as one package has versions."""
    versions: dict[str, set[str]] = defaultdict(set)
    for lock in (LOCK, *OTHERS.values(), PROGRAMS):
        for line in (root / lock).read_text("utf-8").splitlines():
            if pin := PIN.fullmatch(line):
                versions[pin[1]].add(pin[2])
    groups: list[dict[str, str]] = [{} for _ in range(max(map(len, versions.values())))]
    for name, found in versions.items():
        for group, version in zip(groups, sorted(found), strict=False):
            group[name] = version
    return groups


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Run pip-audit for each group, because it takes one version of a package at a time."""
    code = 0
    with TemporaryDirectory() as folder:
        path = Path(folder) / "pins.txt"
        for group in pins(root):
            # No pin has a marker here: pip-audit leaves out the packages of other platforms.
            path.write_text("".join(f"{name}=={version}\n" for name, version in group.items()))
            command = [sys.executable, "-m", "pip_audit", "--requirement", str(path), "--strict"]
            command += ["--no-deps", "--disable-pip", "--progress-spinner", "off"]
            command += ["--cache-dir", folder, *arguments]
            # Its warnings recommend hashes, which the lock files have.
            environment = {"PIP_AUDIT_LOGLEVEL": "ERROR", **os.environ}
            done = subprocess.run(  # noqa: S603 - the arguments are those of the developer
                command, env=environment, check=False
            )
            code |= done.returncode
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
