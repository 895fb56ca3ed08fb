"""The page about migrations: its code runs."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()


def test_its_code(tmp_path: Path) -> None:
    """A20: two backends of an application's own, from start to finish."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("finished\n", "")
