"""Tests of the systemd unit: it is valid, and matches how the server behaves."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from taskqueue_core.config import Settings
from taskqueue_server.process.reload import LIVE

FOLDER = Path(__file__).parents[2] / "deploy/systemd"
UNIT = (FOLDER / "taskqueue.service").read_text("utf-8")
MARGIN = 15
"""seconds that the end may take in addition to the drain, for the handover and for processes that hang"""


def service() -> dict[str, str]:
    """Return the unit's section [Service]; of a repeated option the last value counts."""
    section = UNIT.partition("[Service]\n")[2].partition("[Install]")[0]
    return dict(re.findall(r"^(\w+)=(.*)$", section, re.MULTILINE))


def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    """``systemd-analyze``, if installed, finds the unit valid and rates its hardening as good."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        assert sys.platform != "linux" or not Path("/run/systemd").exists()
        return
    program = tmp_path / "taskqueue"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "taskqueue.service"
    unit.write_text(UNIT.replace("/opt/taskqueue/bin/taskqueue", str(program)))
    for words in (["verify"], ["security", "--offline=yes", "--threshold=20"]):
        done = subprocess.run(
            [analyze, *words, str(unit)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        assert not done.stderr, done.stderr


def test_it_fits_the_server() -> None:
    """The unit's type, reload signal, stop timeout and restart rules match the server's behaviour."""
    unit, settings = service(), tomllib.loads((FOLDER / "taskqueue.toml").read_text("utf-8"))
    assert unit["Type"] == "notify"
    assert unit["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert unit["KillMode"] == "mixed", "the first process tells the others to drain"
    assert unit["RestartPreventExitStatus"] == "2"
    assert int(unit["TimeoutStopSec"]) >= settings["drain"] + MARGIN
    assert unit["DynamicUser"] == "yes"
    assert "Environment" not in unit, "every user can read the unit, so it must contain no secret"


@pytest.mark.parametrize("commented", [False, True])
def test_the_settings_are_real(*, commented: bool) -> None:
    """Every setting in the example files exists, even if commented out, and those to be reloaded can be."""
    mark = r"# ?" if commented else ""
    text = (FOLDER / "taskqueue.toml").read_text("utf-8")
    names = re.findall(rf"^{mark}([a-z_]+) = ", text, re.MULTILINE)
    assert names
    assert set(names) <= LIVE
    text = (FOLDER / "taskqueue.env").read_text("utf-8")
    names = re.findall(rf"^{mark.rstrip(' ?')}TASKQUEUE_([A-Z_]+)=", text, re.MULTILINE)
    assert names
    ours = {name.lower() for name in names if not name.startswith("REDIS_")}
    assert ours <= set(Settings.model_fields)
