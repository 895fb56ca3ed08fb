"""A process that ends a child process when its parent has ended for any reason."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Literal

# It reads process ids from a pipe whose other end only the parent has. When that end is closed,
# also by a SIGKILL, the loop ends. Signals to the parent's group do not reach it.
_SCRIPT = """
trap '' HUP INT QUIT TERM
pid=0
while read -r word; do pid=$word; done
[ "$pid" -gt 0 ] || exit 0
whom=$2$pid
kill -"$1" "$whom" 2>/dev/null || exit 0
[ "$1" = KILL ] && exit 0
kill -CONT "$whom" 2>/dev/null
tries=0
while kill -0 "$whom" 2>/dev/null; do
    tries=$((tries + 1))
    [ "$tries" -le 50 ] || exec kill -KILL "$whom"
    sleep 0.2
done
"""


class Watchdog:
    """A small process that outlives this one and then ends a child: with ``signal``, and SIGKILL 10 s later.

    ``group``: the child leads a process group, which is ended as a whole, also if the child itself has ended before.

    It is a shell script, so it works wherever there is a shell. Unlike the parent-death signal of Linux, it does not
    depend on the thread that started the child, and runs no code between fork and exec.
    """

    def __init__(self, signal: Literal["TERM", "KILL"], *, group: bool = False) -> None:
        """Start it, with no child to watch."""
        self._process = subprocess.Popen(  # noqa: S603 - the script above
            ["/bin/sh", "-c", _SCRIPT, "taskqueue-watchdog", signal, "-" if group else ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """Watch the child with this id instead of the previous one.

        Pass 0 once the child was waited for: the system may then give its id to another process.
        """
        assert self._process.stdin is not None  # noqa: S101 - it is piped
        with contextlib.suppress(BrokenPipeError):  # the watchdog was killed
            self._process.stdin.write(b"%d\n" % pid)
            self._process.stdin.flush()

    def close(self) -> None:
        """End without ending the child."""
        self.watch(0)
        assert self._process.stdin is not None  # noqa: S101 - it is piped
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
