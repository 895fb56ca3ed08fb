"""Send jobs to GPU servers: run the dispatcher, submit jobs, manage models and endpoints.

The command group ``taskqueue dispatch``, loaded through the entry-point group ``taskqueue.commands``.
"""

from taskqueue_dispatch.cli.commands import add_to

__all__ = ["add_to"]
