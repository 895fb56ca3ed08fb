"""``taskqueue erase``: erase the tasks that have a tag."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from rich.markup import escape

from taskqueue_cli.backends import ServerUrl, record_action, with_backend
from taskqueue_cli.commands.stats import check_known
from taskqueue_cli.commands.status import Key
from taskqueue_cli.output import AsJson, argument, console, note, option, print_json
from taskqueue_core.authoring.listings import Query
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Erasure, control_of, count_tagged, listing_of
from taskqueue_core.errors import InvalidInput
from taskqueue_core.tasks import State

Tag = Annotated[str, argument("Tag of the tasks, such as user:42.", metavar="TAG")]


def erase(
    key: Key,
    tag: Tag,
    *,
    confirm: Annotated[
        str | None,
        option(
            "The tag again, as a confirmation. Without it, the tasks are only counted.",
            metavar="TAG",
        ),
    ] = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Erase the tasks of a queue that have a tag, and all that is stored of them. This cannot be undone.

    Tasks that have not ended are cancelled, also running ones, and dead letters are discarded. Then their statuses,
    payloads, results, histories and events are deleted. The queue's setting index must name the tag. If the command is
    interrupted, repeat it.
    """
    if confirm not in (None, tag):
        raise InvalidInput("--confirm", "another tag", "the tag, which is TAG")

    async def act(backend: Backend) -> tuple[Erasure, bool]:
        control, listing = control_of(backend), listing_of(backend)
        check_known([key], await control.queues())
        settings, details = await control.settings(key), f"tag={tag}"
        if confirm is None:
            return await count_tagged(listing, key, tag), settings.journal
        Query(key=key, tag=tag).check(settings)
        await record_action(backend, "begin to erase", key, details=details)
        states, more = Counter[State](), True
        try:
            while more:
                erased = await listing.erase(key, tag)
                states.update(erased.tasks)
                more = erased.more
        finally:
            number = states.total()
            if number or not more:
                await record_action(backend, "erase", key, tasks=number, details=details)
        return Erasure(tasks=dict(states)), settings.journal

    found, journal = with_backend(server, act)
    if as_json:
        counts = {"tasks": found.tasks, "count": found.count, "more": found.more}
        print_json({"key": key, "tag": tag, "erased": confirm is not None, **counts})
        return
    number = f"{found.count:,}{' or more' if found.more else ''}"
    tasks = "task" if found.count == 1 else "tasks"
    each = ", ".join(f"{n:,} {state.replace('_', ' ')}" for state, n in found.tasks.items())
    where = f"with the tag [bold]{escape(tag)}[/] in queue [bold]{escape(key)}[/]"
    shown = f"{number} {tasks} {where}" + (f": {each}" if each else "")
    if confirm is None:
        console.print(f"{shown}\nTo erase them, add --confirm {escape(tag)}")
        return
    console.print(f"[green]✔[/] erased {shown}")
    if journal:
        note("the journal still has the changes of these tasks, until it is trimmed", "yellow")
