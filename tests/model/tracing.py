"""Records every execution of a script atomically with it: its arguments, its time and its answer.

Each script is wrapped so that it also appends its call to a list in its partition. So the record has the order of Redis
and is complete: it includes calls whose answer was lost, and excludes calls that never arrived. If Redis is killed and
loses writes, it loses their records too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hiredis import Reader

from taskqueue_redis.scripts import assembly
from tests.redis.servers import RedisServer

TRACED = "TASKQUEUE_TRACED"
"""environment variable that makes the processes of a chaos run wrap their scripts"""
_KEY = ":trace"
_UNTRACED = frozenset({"install"})
_WRAPPED = """
local traced_redis, traced_time = redis, redis.call('TIME')
local redis = {{
  call = function(command, ...)
    if command == 'TIME' then return traced_time end
    return traced_redis.call(command, ...)
  end,
  pcall = traced_redis.pcall,
  error_reply = traced_redis.error_reply,
}}
local function transition()
{script}
end

local function written(value)
  local kind = type(value)
  if kind == 'table' then
    if value.err then return written({{'!', value.err}}) end
    local parts = {{}}
    for i = 1, #value do parts[i] = written(value[i]) end
    return '*' .. #value .. '\\r\\n' .. table.concat(parts)
  elseif kind == 'number' then
    return ':' .. string.format('%d', value) .. '\\r\\n'
  elseif kind == 'string' then
    return '$' .. #value .. '\\r\\n' .. value .. '\\r\\n'
  end
  return '$-1\\r\\n'
end

local answer = transition()
traced_redis.pcall('RPUSH', KEYS[1] .. '{key}', written({{'{name}', ARGV, traced_time, {{answer}}}}))
return answer
"""


class Call(NamedTuple):
    """One recorded execution of a script."""

    name: str
    words: tuple[bytes, ...]
    """arguments of the script, without the epoch and the time"""
    now: int
    """time for tasks in microseconds; a test may have set it"""
    real: int
    """time of the Redis server in microseconds"""
    answer: Any

    def __str__(self) -> str:
        """Return the call as one line, shortened and without the answer."""
        shown = " ".join(repr(word[:40])[2:-1] for word in self.words[:12])
        return f"{self.name} {shown}{' …' if len(self.words) > 12 else ''}"


@functools.cache
def _wrapped(name: str) -> str:
    return _WRAPPED.format(script=_plain(name), name=name, key=_KEY)


_plain = assembly.source


def traced(name: str) -> str:
    """Return the source of a script that records its executions."""
    return _plain(name) if name in _UNTRACED else _wrapped(name)


def install() -> Callable[[], None]:
    """Make this process run wrapped scripts; return a function that undoes it."""
    assembly.source = traced  # type: ignore[assignment] # without its cache, which is in `_wrapped`
    assembly.script_digest.cache_clear()

    def end() -> None:
        assembly.source = _plain
        assembly.script_digest.cache_clear()

    return end


def traces(server: RedisServer, partition: str) -> Iterator[Call]:
    """Yield the recorded calls of a partition, oldest first."""
    with server.connect() as connection:
        start, page = 0, 2000
        while told := connection.call("LRANGE", f"{partition}{_KEY}", start, start + page - 1):
            start += page
            yield from map(_read, told)


def _read(text: bytes) -> Call:
    reader = Reader()
    reader.feed(text)
    name, (_, passed, *words), (whole, parts), (answer,) = reader.gets()
    real = int(whole) * 1_000_000 + int(parts)
    return Call(name.decode(), tuple(words), int(passed or real), real, answer)
