"""Whether more executions fail than before, window after window: each is looked at once, when it is over."""

from __future__ import annotations

from taskqueue_spark.service.options import StreamOptions
from taskqueue_spark.service.state import Rise, State, Window
from taskqueue_spark.service.windows import failed

__all__ = ["judge"]

_RISES = 100
"""that are remembered, beside those that are not over"""


def judge(state: State, options: StreamOptions, as_of: float) -> None:
    """Look at the windows that are over and were not looked at, in their order, and note where failures rise.

    ``as_of``: the time (Unix seconds) up to which everything that happened is known.
    """
    last = int(as_of // options.window - 1) * options.window
    open_ones = {rise.key: rise for rise in state.rises if not rise.over}
    for key, windows in sorted(state.windows.items()):
        # The window behind one in which something happened may have nothing, which ends an episode.
        due = {start for one in windows for start in (one, one + options.window)}
        for start in sorted(start for start in due if state.judged < start <= last):
            found = _rise(key, windows, start, options)
            if found is None:
                if key in open_ones:
                    open_ones.pop(key).over = True
            elif key not in open_ones:
                open_ones[key] = found
                state.rises.append(found)
    state.judged = max(state.judged, last)
    state.rises.sort(key=lambda rise: rise.window)
    state.rises = [
        rise for place, rise in enumerate(reversed(state.rises)) if place < _RISES or not rise.over
    ][::-1]


def _rise(key: str, windows: dict[int, Window], start: int, options: StreamOptions) -> Rise | None:
    """Compare a window with those before it."""
    bad, all_of_them = failed(windows.get(start, Window()))
    share = bad / all_of_them if all_of_them else 0.0
    if all_of_them < options.failure_least or share < options.failure_share:
        return None
    others = range(start - options.keep * options.window, start, options.window)
    before = [failed(windows[other]) for other in others if other in windows]
    executions = sum(number for _, number in before)
    usual = sum(number for number, _ in before) / executions if executions else 0.0
    if share <= options.failure_growth * usual:
        return None
    return Rise(key=key, window=start, share=share, usual=usual, executions=all_of_them)
