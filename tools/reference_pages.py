"""Write the pages of the reference that list what the code has. With --check, only compare."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer.main
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

import taskqueue_core
from taskqueue_cli.app import app
from taskqueue_core import errors
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.config import Settings
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_memory.backend import MemorySettings
from taskqueue_prefect.settings import PrefectSettings
from taskqueue_redis.config import RedisSettings

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
CLASSES: dict[str, type[BaseModel]] = {
    "Applications, workers and the server": Settings,
    "The memory backend": MemorySettings,
    "The Redis backend": RedisSettings,
    "The dispatcher": DispatchSettings,
    "The Prefect integration": PrefectSettings,
}
KINDS: dict[Any, str] = {
    bool: "`true` or `false`",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    SecretStr: "secret",
    dict: "table",
}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each field of a model, without its line breaks."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    found = {}
    body = getattr(tree, "body", [])
    for field, text in pairwise(body):
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def kind(annotation: Any) -> str:
    """Return what a setting contains, in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return kind(inner[0])
    if origin in {Union, UnionType}:
        return " or ".join(kind(each) for each in inner if each is not type(None))
    if origin in {frozenset, tuple}:
        return f"list of {kind(inner[0])}"
    choices = inner if origin is Literal else ()
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        choices = tuple(each.value for each in annotation)
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    found = "table" if is_model else KINDS.get(origin or annotation, "`module.name`")
    return ", ".join(f"`{each}`" for each in choices) or found


def bounds(field: FieldInfo) -> str:
    """Return the smallest and largest value of a setting."""
    found = [
        f"{sign} {getattr(each, name):,}"
        for each in field.metadata
        for name, sign in SIGNS.items()
        if getattr(each, name, None) is not None
    ]
    return f" {' and '.join(found)}" if found else ""


def default(field: FieldInfo) -> str:
    """Return the default of a setting as an operator would write it."""
    value = field.get_default(call_default_factory=True)
    value = value.get_secret_value() if isinstance(value, SecretStr) else value
    if value in (None, "", (), frozenset()) or isinstance(value, dict | BaseModel):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | frozenset):
        return f"`{','.join(map(str, value))}`"
    return f"`{value.value if isinstance(value, Enum) else value}`"


def rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Yield the lines of the table of a model's fields."""
    texts = descriptions(model)
    yield f"| {'variable' if prefix else 'setting'} | value | default | |"
    yield "| --- | --- | --- | --- |"
    for name, field in model.model_fields.items():
        text = texts[name].replace("``", "`").replace("|", "\\|")
        variable = f"{prefix}{name.upper()}" if prefix else name
        yield f"| `{variable}` | {kind(field.annotation)}{bounds(field)} | {default(field)} | {text} |"


def settings() -> str:
    """Return the page of all settings."""
    lines = [
        "# Settings",
        "",
        "Settings come from the environment, from a file `.env`, from `taskqueue.toml` (only those of the first table)",
        "and from secret files. An earlier source takes precedence. In the environment, commas separate the items of a",
        "list.",
    ]
    for title, model in CLASSES.items():
        lines += ["", f"## {title}", "", *rows(model, str(model.model_config.get("env_prefix")))]
    return "\n".join(lines) + "\n"


def queue_settings() -> str:
    """Return the page of the settings of a queue."""
    lines = [
        "# Settings of a queue",
        "",
        "The store keeps them. Set them with `taskqueue queue set`, over [HTTP](../http.md), or in the declaration of",
        "a [task](../tasks.md#retries-timeouts-and-limits). Durations are in seconds.",
        "",
        *rows(QueueSettings, ""),
    ]
    return "\n".join(lines) + "\n"


def is_error(value: object) -> bool:
    """Return whether a value is an exception class of the package."""
    return isinstance(value, type) and issubclass(value, errors.TaskQueueError)


def error_codes() -> str:
    """Return the page of the errors with their codes."""
    lines = [
        "# Error codes",
        "",
        "Each exception of the package has a `code`, which HTTP errors and frames of the socket contain too. A code",
        "does not change its meaning.",
        "",
        "| code | meaning | exception |",
        "| --- | --- | --- |",
    ]
    names = {
        *errors.__all__,
        *(name for name in taskqueue_core.__all__ if is_error(getattr(taskqueue_core, name))),
    }
    for name in sorted(names):
        found = getattr(errors, name, None) or getattr(taskqueue_core, name)
        text = (inspect.getdoc(found) or "").partition("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{found.code}` | {text.replace('``', '`')} | `{name}` |")
    return "\n".join(lines) + "\n"


def _commands(command: Any, context: Any) -> Iterator[tuple[Any, Any]]:
    if not hasattr(command, "list_commands"):
        yield command, context
        return
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        yield from _commands(inner, inner.context_class(inner, info_name=name, parent=context))


def command_line() -> str:
    """Return the page of the commands of ``taskqueue``."""
    whole = typer.main.get_command(app)
    lines = ["# Command line", "", str(whole.help), "", str(whole.epilog)]
    for command, context in _commands(whole, whole.context_class(whole, info_name="taskqueue")):
        usage = command.get_usage(context).removeprefix("Usage: ")
        help_text = inspect.cleandoc(command.help or "").replace("\b", "").strip()
        lines += ["", f"## {context.command_path}", "", "```text", " ".join(usage.split()), "```"]
        lines += ["", help_text.replace("<", "&lt;"), "", "| option | |", "| --- | --- |"]
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:
                words = " ".join(record[1].split()).replace("|", "\\|").replace("<", "&lt;")
                names = record[0].strip().replace("|", "\\|")
                lines.append(f"| `{names}` | {words} |")
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings,
    "queue-settings.md": queue_settings,
    "error-codes.md": error_codes,
    "command-line.md": command_line,
}


def main(arguments: list[str]) -> int:
    """Write the pages; with --check, return 1 if one is out of date."""
    wrong = 0
    for name, content in PAGES.items():
        path, fresh = REFERENCE / name, content()
        if "--check" not in arguments:
            path.write_text(fresh, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != fresh:
            print(f"docs/reference/{name} is out of date: run `python tools/reference_pages.py`.")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
