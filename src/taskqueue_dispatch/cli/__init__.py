"""The command group ``taskqueue dispatch``, loaded through the entry-point group ``taskqueue.commands``."""

from taskqueue_dispatch.cli.commands import add_to

__all__ = ["add_to"]
