"""Tests of the table of settings on the page about Prefect."""

from __future__ import annotations

import re

from taskqueue_prefect.settings import ALIASES, BACKEND, PREFIXES, PrefectSettings
from tests.binaries.folders import ROOT

PAGE = (ROOT / "docs" / "prefect.md").read_text()
PREFIX = str(PrefectSettings.model_config["env_prefix"])
ROWS = dict(re.findall(r"^\| `(TASKQUEUE_\w+)` \| (.+?) \| .+ \|$", PAGE, re.MULTILINE))
"""the defaults on the page, by the names of the settings"""


def written(default: object) -> str:
    """Return a default value as the page shows it."""
    if isinstance(default, bool):
        return f"`{default}`".lower()
    assert isinstance(default, (int, float))
    return f"`{default:g}`"


def test_every_setting_with_its_default() -> None:
    """Rows E9, OPEN-E3: the page lists each setting once, by its own name and with its default. It lists no others."""
    fields = {PREFIX + name.upper(): field for name, field in PrefectSettings.model_fields.items()}
    assert set(ROWS) == {BACKEND, *fields}
    assert PAGE.count("\n| `TASKQUEUE_") == len(ROWS)
    for name, field in fields.items():
        if field.default is None:
            assert "Prefect's" in ROWS[name]
        else:
            assert ROWS[name] == written(field.default), name


def test_every_alias() -> None:
    """Rows E4, E9, OPEN-E3: the page mentions each alias in Prefect's style, and each alias sets one setting."""
    said = PAGE.split("### Settings", 1)[1].split("\n##", 1)[0]
    words = [word for several in ALIASES.values() for word in several]
    assert len(words) == len(set(words))
    assert all(f"`{name}`" in said for name in (*words, *PREFIXES))
