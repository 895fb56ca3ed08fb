"""Type checkers accept right calls of declared tasks, and refuse wrong ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

TYPED = Path(__file__).with_name("typed.txt")
ROOT = TYPED.parents[2]


def test_errors_of_mypy(tmp_path: Path) -> None:
    """U1: a wrong, missing or misspelt argument or option is an error, and types of results are those of functions."""
    program = tmp_path / "typed.py"
    program.write_text(TYPED.read_text())
    words = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context"]
    done = subprocess.run(
        [*words, f"--config-file={ROOT / 'pyproject.toml'}", str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[int, set[str]] = {}
    for line, code in re.findall(r"typed\.py:(\d+): error: .*\[([a-z-]+)\]", done.stdout):
        found.setdefault(int(line), set()).add(code)
    expected = {
        number: set(match[1].split(","))
        for number, line in enumerate(TYPED.read_text().splitlines(), start=1)
        if (match := re.search(r"# error: ([a-z,-]+)", line))
    }
    assert found == expected, done.stdout + done.stderr


def test_errors_of_pyright(tmp_path: Path) -> None:
    """U1: Pyright finds the same lines wrong as mypy, and no others."""
    (tmp_path / "typed.py").write_text(TYPED.read_text())
    config = {"include": ["typed.py"], "extraPaths": [str(ROOT / "src")]}
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(json.dumps({**config, "typeCheckingMode": "standard"}))
    words = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*words, "--project", str(settings)], capture_output=True, text=True, check=False
    )
    found = {
        each["range"]["start"]["line"] + 1: each["message"]
        for each in json.loads(done.stdout)["generalDiagnostics"]
    }
    lines = TYPED.read_text().splitlines()
    assert found.keys() == {n for n, line in enumerate(lines, start=1) if "# error: " in line}, (
        found
    )
