"""An extension of Griffe, which reads the docstrings for the documentation site.

It fences examples (``>>>``), so that they appear as code, and makes links of the public names and the pages that
docstrings mention.
"""

import importlib
import re
from pathlib import Path
from typing import Any

import griffe

DOCS = Path(__file__).parent.parent / "docs"
PACKAGES = ("taskqueue_worker.testing", "taskqueue_worker", "taskqueue_core")
"""packages with public names; a name in several of them links to the last"""
_EXAMPLE = re.compile(r"^( *)>>> .*\n(?:\1.*\S.*\n?)*", re.MULTILINE)
_PAGE = re.compile(r"\bdocs/([a-z-]+\.md)")
_NAME = re.compile(r"(?<![`\[\w])`([A-Za-z]\w+)((?:\.\w+)*)`(?!`)")


def public_names() -> dict[str, str]:
    """Return the full name of each public name."""
    return {
        name: f"{package}.{name}"
        for package in PACKAGES
        for name in importlib.import_module(package).__all__
    }


def fenced(text: str) -> str:
    """Return a docstring whose examples are blocks of code."""
    return _EXAMPLE.sub(
        lambda found: f"{found[1]}```pycon\n{found[0].rstrip()}\n{found[1]}```\n", f"{text}\n"
    ).rstrip()


def page_link(found: re.Match[str]) -> str:
    """Return a link to a page, with its title, for the pages of the reference, which are two folders below."""
    title = (DOCS / found[1]).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{title}](../../{found[1]})"


class Docstrings(griffe.Extension):
    """Changes each docstring after it was read."""

    def __init__(self) -> None:
        super().__init__()
        self._names = public_names()

    def _link(self, found: re.Match[str]) -> str:
        name = self._names.get(found[1])
        return found[0] if name is None or found[2] else f"[`{found[1]}`][{name}]"

    def on_object(self, *, obj: griffe.Object, **_more: Any) -> None:
        """Fence the examples of an object's docstring and link its names."""
        if obj.docstring is not None:
            text = fenced(obj.docstring.value)
            parts = re.split(r"(```pycon\n.*?```)", text, flags=re.DOTALL)
            obj.docstring.value = "".join(
                part
                if part.startswith("```")
                else _PAGE.sub(page_link, _NAME.sub(self._link, part))
                for part in parts
            )
