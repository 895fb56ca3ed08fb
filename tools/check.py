"""Runs every static check, also after one failed, and sums up."""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHECKS = {
    "ruff": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "types": ["mypy", "--num-workers", "2"],
    "imports": ["lint-imports"],
    "files": [sys.executable, "tools/check_files.py"],
    "public names": [sys.executable, "tools/check_public_names.py"],
    "coverage": [sys.executable, "tools/coverage_table.py", "--check"],
    "lock": [sys.executable, "tools/check_lock.py"],
}


def main(checks: dict[str, list[str]] = CHECKS) -> int:
    """Shows what the failed checks said; 1 if there are any."""
    failed = []
    for name, command in checks.items():
        start = time.monotonic()
        done = subprocess.run(  # noqa: S603 - the commands stand above
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        verdict = "FAILED" if done.returncode else "ok"
        print(f"{name:<14}{verdict:<8}{time.monotonic() - start:5.1f} s", flush=True)
        if done.returncode:
            failed.append(name)
            print(done.stdout, flush=True)
    print(f"Failed: {', '.join(failed)}." if failed else "All checks passed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
