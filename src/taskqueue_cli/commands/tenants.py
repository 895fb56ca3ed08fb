"""``taskqueue tenant``: pause and resume the tenants of a queue."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from taskqueue_cli.backends import BACKEND_HELP, ServerUrl
from taskqueue_cli.commands.queue_changes import Key, change_and_show
from taskqueue_cli.output import AsJson, argument
from taskqueue_core.queue_settings import pause_tenant

Tenant = Annotated[str, argument("Name of the tenant.", metavar="TENANT")]
_TEXT = "Pause and resume the tenants of a queue."
tenant = typer.Typer(
    name="tenant", help=f"{_TEXT}\n\n{BACKEND_HELP}", short_help=_TEXT, no_args_is_help=True
)


@tenant.command()
def pause(key: Key, name: Tenant, *, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """Deliver no tasks of a tenant until it is resumed. The queue needs fair order.

    Tasks of the tenant are accepted and wait, also retries and scheduled tasks. Running tasks are not affected.
    """
    change_and_show(key, partial(pause_tenant, tenant=name, paused=True), server, as_json=as_json)


@tenant.command()
def resume(key: Key, name: Tenant, *, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """Deliver the tasks of a paused tenant again."""
    change_and_show(key, partial(pause_tenant, tenant=name, paused=False), server, as_json=as_json)
