"""``python -m taskqueue_dispatch.gpu_server``: a simulated GPU server as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys

from taskqueue_dispatch.gpu_server.simulator import Mode, SimulatedGpu

_PORTS = range(65_536)


def main(arguments: list[str] | None = None) -> int:
    """Run the server until SIGTERM or SIGINT. The first line of output is JSON with ``url``, ``port`` and ``name``."""
    requested = _parser().parse_args(arguments)
    low, high = requested.latency[0], requested.latency[-1]
    if not 0 <= low <= high < float("inf") or len(requested.latency) > 2:  # noqa: PLR2004 - one value, or a lower and an upper bound
        _parser().error("--latency must be one or two numbers of at least 0, the smaller one first")
    if requested.slots < 1 or requested.port not in _PORTS:
        _parser().error("--slots must be at least 1, and --port must be between 0 and 65535")
    gpu = SimulatedGpu(
        slots=requested.slots,
        latency=(low, high),
        asynchronous=requested.asynchronous,
        mode=requested.mode,
        name=requested.name,
        port=requested.port,
        seed=requested.seed,
        dispatcher=requested.dispatcher,
    )
    asyncio.run(_serve(gpu))
    return 0


async def _serve(gpu: SimulatedGpu) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with gpu:
        sys.stdout.write(json.dumps({"url": gpu.url, "port": gpu.port, "name": gpu.name}) + "\n")
        sys.stdout.flush()
        await stop.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m taskqueue_dispatch.gpu_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="port; 0 selects a free port")
    parser.add_argument("--slots", type=int, default=1, help="number of jobs that run at once")
    parser.add_argument(
        "--latency",
        type=float,
        nargs="+",
        default=[0.02],
        metavar="SECONDS",
        help="seconds per job; two values are the bounds of a uniform distribution",
    )
    parser.add_argument(
        "--asynchronous",
        action="store_true",
        help="respond with ids; the results are then polled or pushed",
    )
    parser.add_argument("--mode", type=Mode, choices=tuple(Mode), default=Mode.OK)
    parser.add_argument("--name", default="gpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dispatcher", help="URL to push results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
