"""Run all static checks in parallel and print a summary."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHECKS = {
    "ruff": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "types": ["mypy"],
    "imports": ["lint-imports"],
    "files": [sys.executable, "tools/check_files.py"],
    "public names": [sys.executable, "tools/check_public_names.py"],
    "coverage": [sys.executable, "tools/coverage_table.py", "--check"],
    "reference": [sys.executable, "tools/reference_pages.py", "--check"],
    "docs": ["mkdocs", "build", "--strict", "--quiet", "--site-dir", "build/checked-docs"],
    "words": [sys.executable, "tools/check_words.py"],
    "lock": [sys.executable, "tools/check_lock.py"],
}


def run(command: list[str]) -> tuple[bool, str, float]:
    """Run one check; return whether it passed, its output, and its duration in seconds."""
    start = time.monotonic()
    done = subprocess.run(  # noqa: S603 - the commands come from CHECKS
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return not done.returncode, done.stdout, time.monotonic() - start


def main(checks: dict[str, list[str]] = CHECKS) -> int:
    """Run all checks in parallel and print the output of failed checks; return 1 if a check failed."""
    failed = []
    with ThreadPoolExecutor(len(checks)) as pool:
        names = {pool.submit(run, command): name for name, command in checks.items()}
        for future in as_completed(names):
            passed, output, seconds = future.result()
            print(
                f"{names[future]:<14}{'ok' if passed else 'FAILED':<8}{seconds:5.1f} s", flush=True
            )
            if not passed:
                failed.append(names[future])
                print(output, flush=True)
    print(f"Failed: {', '.join(failed)}." if failed else "All checks passed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
