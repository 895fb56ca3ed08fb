"""What the machine and Redis did during a measurement: CPU time, commands, bytes and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from entries.adapter import PlainRedis

QUIET = 0.35
"""maximum number of cores that other processes may use, for a measurement to count as undisturbed"""
_LOOK = 0.1
"""seconds of one sample"""


def info(ask: PlainRedis) -> dict[str, str]:
    """Return all fields of Redis's command INFO."""
    lines = (line.partition(":") for line in ask("INFO", "everything").splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


class RedisWindow:
    """The work of Redis between the creation of this object and the call of `figures`."""

    def __init__(self, ask: PlainRedis) -> None:
        self._ask = ask
        self._before = info(ask)

    def figures(self, tasks: int) -> dict[str, Any]:
        """Return figures per task. Commands that scripts call are counted too.

        ``spent`` is in microseconds. The time of a script includes the commands that it calls.
        """
        after = info(self._ask)

        def grown(name: str) -> float:
            return float(after[name]) - float(self._before.get(name, 0))

        calls, spent = {}, {}
        for name, value in after.items():
            if name.startswith("cmdstat_"):
                command, before = name.removeprefix("cmdstat_"), self._before.get(name, "")
                calls[command] = _part(value, "calls") - _part(before, "calls")
                spent[command] = _part(value, "usec") - _part(before, "usec")
        calls["info"] = calls.get("info", 0) - 1  # ours
        cpu = grown("used_cpu_user") + grown("used_cpu_sys")
        return {
            "commands": sum(calls.values()) / tasks,
            "reads": (grown("total_reads_processed") - 1) / tasks,
            "bytes_in": grown("total_net_input_bytes") / tasks,
            "bytes_out": grown("total_net_output_bytes") / tasks,
            "redis_cpu": cpu,
            "calls": {name: round(n / tasks, 4) for name, n in calls.items() if n >= tasks / 1000},
            "spent": {name: round(n / tasks, 3) for name, n in spent.items() if n >= tasks / 20},
        }


def _part(value: str, name: str) -> int:
    parts = dict(part.split("=") for part in value.split(",") if part)
    return int(parts.get(name, 0))


def memory(ask: PlainRedis) -> int:
    """Return the bytes of memory that Redis uses, without the buffers of connections and of the append-only file.

    The buffers are read for each connection, because the total in INFO may be a second old.
    """
    about = info(ask)
    clients = sum(
        int(word.removeprefix("tot-mem="))
        for word in ask("CLIENT", "LIST").split()
        if word.startswith("tot-mem=")
    )
    return int(about["used_memory"]) - clients - int(about["mem_aof_buffer"])


def cpu_of(pid: int) -> float:
    """Return the seconds of CPU that a process has used, with its threads; 0 if it cannot be determined."""
    total = 0
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


class Foreign:
    """The CPU use of other processes since the creation of this object, including time stolen by the hypervisor."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = [os.getpid(), *pids]
        self._start, self._busy = time.monotonic(), _busy()
        self._own = sum(map(cpu_of, self._pids))

    def cores(self) -> float:
        """Return the mean number of cores that other processes have used."""
        own = sum(map(cpu_of, self._pids)) - self._own
        return max(0.0, _busy() - self._busy - own) / (time.monotonic() - self._start)


class Patience:
    """The maximum time that a run waits for an undisturbed machine, before one measurement and in total."""

    def __init__(self, each: float, total: float) -> None:
        self._each, self._left = each, total

    def wait(self, pids: Iterable[int]) -> float:
        """Wait until other processes use little CPU or the time is over; return the seconds waited."""
        own = list(pids)
        start = time.monotonic()
        most = min(self._each, self._left)
        while True:
            look = Foreign(own)
            time.sleep(_LOOK)
            waited = time.monotonic() - start
            if look.cores() <= QUIET or waited >= most:
                self._left = max(0.0, self._left - waited)
                return waited


def _busy() -> float:
    try:
        ticks = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    except OSError:
        return 0.0  # no such count here: every window counts as quiet
    user, nice, system, _, _, irq, soft, steal = map(int, ticks[:8])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
