"""Assembly of the Lua scripts in ``lua/`` from their parts, so that a call executes as little as possible.

Redis executes all of a script on every call: each constant that it stores, and each function that it defines, whether
the call needs it or not. So numbers and strings are written to where they are used, functions that the script does not
use are left out, and functions that most calls do not need are defined on demand.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources

from taskqueue_redis.setup.permissions import rights_in_lua

_LEVELS = frozenset({"queue", "streams"})
"""the shared parts with which a Lua function of its own begins"""
_PARTS = re.compile(r"^--@ (.*)\n")
_FUNCTION = re.compile(
    r"^local function (\w+)\([^()\n]*\)(?: [^-\n].*\n|(?: *--.*)?\n(?:.*\n)*?end\n)", re.MULTILINE
)
"""a function of a part: on one line, or up to the first line that is only ``end``"""
_TOKEN = re.compile(r"""--.*|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|\w+""")
"""a comment, a string, or a name"""
_LITERAL = r"(?:\d+(?:\.\d+)?|'[^'\\\n]*')"
_CONSTANTS = re.compile(
    rf"^local ([A-Z_]+(?:, [A-Z_]+)*) = ({_LITERAL}(?:, {_LITERAL})*)(?= *(?:--.*)?$)", re.MULTILINE
)
_WORDS = re.compile(r"--.*|'(?:[^'\\\n]|\\.)*'|(?<![\w.:])[A-Z_]+(?!\w)")
"""comments, strings, and the names of constants"""


@cache
def source(name: str) -> str:
    """Return the text of a script, preceded by the shared Lua parts that its first line names.

    The parts after a slash in that line are wrapped in the Lua function ``rarely``, which returns their functions. The
    parts after a second slash may call ``rarely``.
    """
    folder = resources.files("taskqueue_redis") / "lua"
    text = (folder / f"{name}.lua").read_text()
    named = _PARTS.match(text)
    if named is None:
        return text
    always, rarely, using = (_read(part.split()) for part in f"{named[1]}//".split("/")[:3])
    using = _used(using, text)
    rarely = _used(rarely, _whole(using) + text)
    always = _used(always, _whole(rarely) + _whole(using) + text)
    end = (_lazily(rarely) if rarely else "") + _joined(using, text)
    return _with_constants(name, _joined(always, end))


@cache
def script_digest(name: str) -> str:
    """Return the hash by which Redis knows a script."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


def _read(names: Sequence[str]) -> dict[str, str]:
    folder = resources.files("taskqueue_redis") / "lua" / "lib"
    rights = rights_in_lua("META")
    return {name: (folder / f"{name}.lua").read_text().replace("RIGHTS", rights) for name in names}


def _whole(parts: Mapping[str, str]) -> str:
    return "".join(parts.values())


def _used(parts: Mapping[str, str], text: str) -> dict[str, str]:
    """Return the parts without the functions that neither they nor ``text``, the code that follows them, name."""
    functions: dict[str, str] = {}
    for found in _FUNCTION.finditer(_whole(parts)):
        functions[found[1]] = functions.get(found[1], "") + found[0].removeprefix(
            f"local function {found[1]}"
        )
    used: set[str] = set()
    new = _names(_FUNCTION.sub("", _whole(parts)) + text) & functions.keys()
    while new:
        used |= new
        new = set().union(*(_names(functions[name]) for name in new)) & functions.keys() - used
    return {
        name: _FUNCTION.sub(lambda found: found[0] if found[1] in used else "", part)
        for name, part in parts.items()
    }


def _names(text: str) -> set[str]:
    return set(_TOKEN.findall(text))


def _joined(parts: Mapping[str, str], end: str) -> str:
    """Join parts and ``end`` to one Lua block.

    Lua keeps a list of the local variables that inner functions use. To define an inner function, Lua searches this
    list for each local variable of the enclosing function that it uses. Variables from further outside need no search.
    So some parts begin a function of their own: then all definitions take half the time.
    """
    text, ends = "", ""
    for name, part in parts.items():
        if name in _LEVELS and text:
            text, ends = f"{text}return (function()\n", f"{ends}\nend)()\n"
        text += part
    return text + end + ends


def _lazily(parts: Mapping[str, str]) -> str:
    """Wrap parts in a function that defines them on demand: defining them takes longer than most script calls."""
    names = dict.fromkeys(found[1] for found in _FUNCTION.finditer(_whole(parts)))
    functions = ", ".join(f"{name} = {name}" for name in names)
    return (
        "local rare\nlocal function rarely()\nif not rare then\nrare = (function()\n"
        f"{_joined(parts, f'return {{{functions}}}')}\nend)()\nend\nreturn rare\nend\n"
    )


def _with_constants(script: str, text: str) -> str:
    """Write constants to where they are used, so that no call stores them in variables."""
    values: dict[str, str] = {}
    for name, value in _constants(text):
        if values.setdefault(name, value) != value:
            raise ValueError(f"{script}.lua has two constants {name}: {values[name]} and {value}")
    return _WORDS.sub(lambda word: values.get(word[0], word[0]), _CONSTANTS.sub("", text))


def _constants(text: str) -> Iterator[tuple[str, str]]:
    for found in _CONSTANTS.finditer(text):
        yield from zip(found[1].split(", "), re.findall(_LITERAL, found[2]), strict=True)
