"""A watchdog process, which ends a child of this process if this process ends for any reason."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Literal

# The script reads process ids from a pipe to which only the parent writes. When the parent ends, even by SIGKILL, the
# pipe is closed and the loop ends. Signals to the parent's process group do not reach the script.
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
    """A process that outlives this one and then ends a child process: with ``signal``, and 10 s later with SIGKILL.

    ``group``: the child leads a process group, which is ended as a whole, even if the child itself has already ended.

    The watchdog is a shell script, so it works wherever there is a shell. Unlike the parent-death signal of Linux, it
    does not depend on the thread that started the child, and runs no code between fork and exec.
    """

    def __init__(self, signal: Literal["TERM", "KILL"], *, group: bool = False) -> None:
        """Start the watchdog process, which watches no child until `watch` is called."""
        self._process = subprocess.Popen(  # noqa: S603 - it runs only the script above
            ["/bin/sh", "-c", _SCRIPT, "taskqueue-watchdog", signal, "-" if group else ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """Watch this child instead of the previous one. Pass 0 once the child has ended, as its id may be reused."""
        assert self._process.stdin is not None  # noqa: S101 - stdin is a pipe
        with contextlib.suppress(BrokenPipeError):  # the watchdog was killed
            self._process.stdin.write(b"%d\n" % pid)
            self._process.stdin.flush()

    def close(self) -> None:
        """End the watchdog without ending the child."""
        self.watch(0)
        assert self._process.stdin is not None  # noqa: S101 - stdin is a pipe
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
