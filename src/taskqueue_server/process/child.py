"""One of several server processes on one port: ``python -m taskqueue_server.process.child CHANNEL LISTENER``.

Both arguments are file descriptors. `taskqueue_server.process.supervisor` starts the process. The process
drains and exits when the supervisor ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from taskqueue_core.assembly import open_backend
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.logs import set_level, set_up_logs
from taskqueue_server.metrics.exporter import process_exists
from taskqueue_server.process import channel
from taskqueue_server.process.serve import ServerProcess

REFUSED = 2


def main() -> int:
    """Serve until ordered to stop, and return the exit code."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the supervisor sends new settings instead
    control, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    with listener:
        return asyncio.run(_serve(control, listener))


async def _serve(control: socket.socket, listener: socket.socket) -> int:
    reader, writer = await asyncio.open_connection(sock=control, limit=channel.LINE)
    order_stream = channel.received(reader, channel.ORDERS)
    begin = await anext(order_stream, None)
    if not isinstance(begin, channel.Begin):
        return 0  # the supervisor has ended
    sys.path[:] = begin.path
    settings = channel.settings_of(begin.settings)
    set_up_logs(form=settings.log_format)
    set_level(settings.log_level)
    try:
        server = ServerProcess(
            open_backend(begin.backend, settings),
            settings,
            listener=listener,
            on_ready=lambda _: writer.write(channel.line(channel.Listening())),
        )
        order_task = asyncio.create_task(_follow_orders(order_stream, server))
        try:
            await server.run()
        finally:
            order_task.cancel()
    except ConfigurationError as error:
        writer.write(channel.line(channel.ProcessFailed(str(error))))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        return REFUSED
    finally:
        writer.close()
        _clean_up(orphan=reader.at_eof())
    return 0


async def _follow_orders(order_stream: AsyncIterator[channel.Order], server: ServerProcess) -> None:
    async for order in order_stream:
        match order:
            case channel.StopProcess(at_once=False):
                server.stop_once()
            case channel.StopProcess():
                server.stop_once()
                server.stop()
            case channel.Renew(settings):
                server.adopt(channel.settings_of(settings))
    server.stop_once()


def _clean_up(*, orphan: bool) -> None:
    """If the supervisor has ended, delete the metrics files of this process and of processes that ended before."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not orphan or folder is None:
        return
    with contextlib.suppress(OSError):
        for file in Path(folder).glob("*_*.db"):
            pid = int(file.stem.rpartition("_")[2])
            if pid == os.getpid() or not process_exists(pid):
                file.unlink(missing_ok=True)
        Path(folder).rmdir()  # fails while files of other processes remain


if __name__ == "__main__":
    sys.exit(main())
