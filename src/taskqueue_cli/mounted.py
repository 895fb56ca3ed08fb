"""Commands that other packages bring.

A package offers some as an entry point of the group ``taskqueue.commands``: a module, or an object, with a function
``add_to(app)`` that adds them to the `typer.Typer` which is ``taskqueue``. It is called each time that ``taskqueue``
runs, whatever the command: what takes its time to import, a command imports when it is run. Errors of
`taskqueue_core.errors` are told, and become exit codes, as those of any command.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, cast

import typer

from taskqueue_core.errors import ConfigurationError

__all__ = ["COMMANDS_GROUP", "Commands", "mount"]

COMMANDS_GROUP = "taskqueue.commands"


class Commands(Protocol):
    """What such an entry point leads to."""

    def add_to(self, app: typer.Typer) -> None:
        """Add commands, or groups of them."""


def mount(app: typer.Typer, found: Iterable[EntryPoint] | None = None) -> None:
    """Add what is installed, in the order of the names.

    What cannot be imported is a command of its entry point's name that says so, and spoils no other.
    """
    for point in sorted(entry_points(group=COMMANDS_GROUP) if found is None else found):
        try:
            cast("Commands", point.load()).add_to(app)
        except Exception as error:  # noqa: BLE001 - a package may raise anything; its command tells it
            _add_broken(app, point.name, f"{type(error).__name__}: {error}")


def _add_broken(app: typer.Typer, name: str, why: str) -> None:
    def broken() -> None:
        raise ConfigurationError(f"the command {name} cannot be loaded: {why}")

    app.command(
        name=name,
        help="[red]Cannot be loaded.[/]",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(broken)
