"""Checks of the servers. A Redis that would lose tasks is refused; less certain problems are logged."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from taskqueue_core.capabilities import Durability
from taskqueue_core.errors import BackendUnavailable, ConfigurationError
from taskqueue_redis.addresses import Kind
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.client import Ask, RedisClient
from taskqueue_redis.connection.errors import contract_error
from taskqueue_redis.connection.failures import (
    ErrorReply,
    Failure,
    Lost,
    Misconfigured,
    NotReached,
    ScriptError,
    classify,
)
from taskqueue_redis.setup.aof_rewrite import AofRewriter, parse_info
from taskqueue_redis.setup.permissions import SCRIPT_COMMANDS

MINIMUM = (6, 2)
"""oldest version of Redis with all commands that this package uses; every version of Valkey has them"""
_LOADS_WITHOUT_RIGHTS = {"Redis": (8, 6), "Valkey": (9, 1, 2)}
"""The first versions that load their append-only file even if the user ``default`` has no rights.

https://github.com/redis/redis/pull/14545 and https://github.com/valkey-io/valkey/pull/3984. The change is also in late
releases of Valkey 7.2 to 9.0. These are checked nevertheless, because giving the user rights does no harm.
"""
_WRITE_COMMANDS = {"SET", "HSET", "SADD", "RPUSH", "ZADD", "XADD", "XGROUP", "DEL"}
_ALL_RIGHTS = "Give it all rights (it may stay off): run ACL SETUSER default ~* &* +@all, and change the ACL file"
_CURES = {
    Durability.PROCESS: "set appendonly yes",
    Durability.DISK: "set appendonly yes and appendfsync always",
    Durability.REPLICATED: "connect more replicas",
}
_SYNCS = {"no": 0, "everysec": 1, "always": 2}
_KEY = "{%s:0}:check"
_log = logging.getLogger("taskqueue.redis")

# This script returns the commands that the user may not execute. Redis 7.0 and later can report this. For older
# versions, the script executes each command on a key that holds a string, where the command fails or does no harm. At
# the end the key is deleted.
_RIGHTS = """
local denied, at = {}, 1
while ARGV[at] do
    local words = {}
    for n = 1, tonumber(ARGV[at]) do words[n] = ARGV[at + n] end
    at = at + #words + 1
    local allowed = true
    if redis.acl_check_cmd then
        allowed = redis.acl_check_cmd(unpack(words))
    else
        local reply = redis.pcall(unpack(words))
        local text = type(reply) == 'table' and reply.err or ''
        allowed = not (text:find('The user executing', 1, true) or text:find('NOPERM', 1, true))
    end
    if not allowed then denied[#denied + 1] = words[1] end
end
redis.pcall('DEL', KEYS[1])
return denied
"""


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the servers. If the servers differ in a value, the lowest value is reported."""

    address: str
    """address without user and password"""
    product: str
    """product of the server with the lowest version: Redis or Valkey"""
    version: str
    mode: str
    """deployment: single, sentinel or cluster"""
    masters: int
    replicas: int
    """number of replicas of the master that has the fewest"""
    append_only: bool
    """whether every master keeps an append-only file"""
    appendfsync: str
    """how often the append-only file is synced: always, everysec or no; unknown if it cannot be determined"""
    histories: tuple[str, ...]
    """the replication ids of the masters; they change with a restart or failover"""
    maxmemory: int
    """memory limit in bytes; 0 means that no server has a limit"""
    warnings: tuple[str, ...] = ()

    def details(self) -> dict[str, str | int | float | bool | None]:
        facts = msgspec.structs.asdict(self)
        warnings = facts.pop("warnings")
        del facts["histories"]
        return {f"redis_{name}": fact for name, fact in facts.items()} | {
            "redis_warnings": "; ".join(warnings) or None
        }

    def durabilities(self, replicas: int) -> frozenset[Durability]:
        """Return the durabilities that the servers provide if ``replicas`` replicas must confirm each write."""
        durabilities = {Durability.MEMORY}
        if self.append_only:
            durabilities.add(Durability.PROCESS)
            if self.appendfsync == "always":
                durabilities.add(Durability.DISK)
        if self.replicas >= max(1, replicas):
            durabilities.add(Durability.REPLICATED)
        return frozenset(durabilities)


class ServerChecks:
    """Checks of one backend's servers: their configuration, replication history and append-only files."""

    def __init__(self, client: RedisClient) -> None:
        self.facts: ServerFacts | None = None
        """result of `check_once`; None until it has succeeded"""
        self.files = AofRewriter(client)
        self._client = client
        self._histories: tuple[str, ...] | None = None
        self._lock = asyncio.Lock()

    async def check_once(self) -> None:
        """Check the servers at the first call, and log the warnings. Raises the errors of `check_server`."""
        async with self._lock:
            if self.facts is not None:
                return
            facts = await check_server(self._client)
            for warning in facts.warnings:
                _log.warning("%s: %s", facts.address, warning)
            self.facts, self._histories = facts, facts.histories
            self._client.started = True
            if not await self.files.try_once():
                self.files.start()

    async def durabilities(self, replicas: int) -> frozenset[Durability]:
        """Check the servers again, and return the durabilities that they provide.

        ``replicas``: number of replicas that must confirm each write of a replicated queue.
        """
        try:
            facts = await check_server(self._client)
        except Failure as failure:
            raise contract_error(failure) from failure
        except ConfigurationError as error:
            if not self._client.started:
                raise
            raise BackendUnavailable(f"the store is unavailable: {error}") from error
        return facts.durabilities(replicas)

    def require(self, key: str, durability: str, replicas: int) -> None:
        """Raise `ConfigurationError` if the servers do not provide the durability of a queue."""
        required = Durability(durability)
        if self.facts is not None and required not in self.facts.durabilities(replicas):
            raise ConfigurationError(
                f"queue {key!r} has durability {durability!r}, which this Redis does not provide ({_CURES[required]})"
            )

    async def failed_over(self) -> bool:
        """Return whether the replication history has changed since the last call, so writes may have been undone."""
        try:
            replies = await self._client.everywhere("INFO", "replication", quietly=True)
        except Failure:
            return False  # the servers are unavailable again; the next call will detect a change
        before, self._histories = self._histories, _histories(map(parse_info, replies))
        return before not in {None, self._histories}


async def check_server(client: RedisClient) -> ServerFacts:
    """Check the servers and return the facts. Raises `ConfigurationError` for an unsuitable server, or a `Failure`."""
    settings = client.settings
    try:
        # The client repeats PING until Redis has loaded its data. Before that, INFO would report no append-only file.
        await client.everywhere("PING")
        infos = [parse_info(info) for info in await client.everywhere("INFO")]
        for info in infos:
            _refuse(info, settings)
        syncs = await _appendfsync(client)
        await _check_scripts(client)
        await _check_channels(client)
        loads = await _file_loads(client)
    except Misconfigured as failure:
        raise ConfigurationError(str(failure)) from None
    append_only = all(info.get("aof_enabled") == "1" for info in infos)
    product, version = min((_server(info) for info in infos), key=lambda pair: _numbers(pair[1]))
    replicas = min(int(info.get("connected_slaves", 0)) for info in infos)
    return ServerFacts(
        address=settings.address.shown,
        product=product,
        version=version,
        mode=settings.address.kind.value,
        masters=len(infos),
        replicas=replicas,
        append_only=append_only,
        appendfsync=syncs,
        histories=_histories(infos),
        maxmemory=min(filter(None, (int(info.get("maxmemory", 0)) for info in infos)), default=0),
        warnings=tuple(
            _warnings(append_only=append_only, replicas=replicas, syncs=syncs, loads=loads)
        ),
    )


def _histories(infos: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """Return the ids of the servers' replication histories, sorted."""
    return tuple(sorted(info.get("master_replid", "") for info in infos))


def _server(info: Mapping[str, str]) -> tuple[str, str]:
    """Return product and version. Valkey's ``redis_version`` is not its own version, but that of a compatible Redis."""
    if version := info.get("valkey_version"):
        return "Valkey", version
    return "Redis", info["redis_version"]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _refuse(info: Mapping[str, str], settings: RedisSettings) -> None:
    version = info.get("redis_version", "0")
    if _numbers(version) < MINIMUM:
        raise ConfigurationError(f"Redis {version} is too old: use 6.2 or later")
    is_cluster = info.get("cluster_enabled") == "1"
    if is_cluster and settings.address.kind is not Kind.CLUSTER:
        raise ConfigurationError(
            "TASKQUEUE_REDIS_URL: this Redis is a node of a cluster; allowed: redis+cluster://host:port,host:port"
        )
    if info.get("role") != "master":
        raise ConfigurationError(
            "TASKQUEUE_REDIS_URL: this Redis is a read-only replica; allowed: its master, or "
            "redis+sentinel://host:port/service, which finds the current master"
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ConfigurationError(
            f"Redis' maxmemory-policy is {policy}, which deletes tasks when memory runs short: set "
            "'maxmemory-policy noeviction' in redis.conf, or run CONFIG SET maxmemory-policy noeviction"
        )


async def _appendfsync(client: RedisClient) -> str:
    try:
        replies = await client.everywhere("CONFIG", "GET", "appendfsync", quietly=True)
    except Misconfigured:
        # The access list of this package does not allow CONFIG.
        return client.settings.appendfsync or "unknown"
    # With RESP3, the reply is a mapping.
    pairs = (reply.popitem() if isinstance(reply, dict) else reply for reply in replies)
    matches: list[str] = [pair[1].decode() for pair in pairs]
    return min(matches, key=lambda name: _SYNCS.get(name, 0))


async def _check_scripts(client: RedisClient) -> None:
    settings = client.settings
    key = _KEY % settings.prefix
    args: list[str] = []
    for command in SCRIPT_COMMANDS:
        args += [str(len(command)), *(key if name == "KEY" else name for name in command)]
    await _direct(client, key, "PING")
    await _direct(client, key, "WAIT", 0, 0)
    await _direct(client, key, "EVAL", "return 1", 1, key)
    digest = (await client.everywhere("SCRIPT", "LOAD", _RIGHTS))[0].decode()
    denied = await _direct(client, key, "EVALSHA", digest, 1, key, *args)
    if denied:
        names = ", ".join(sorted({name.decode() for name in denied}))
        raise _denied(settings, f"use {names} on keys or channels")


async def _direct(client: RedisClient, key: str, *args: str | int) -> Any:
    try:
        return await client.command(key, *args)
    except Misconfigured as failure:
        text = str(failure)
        name = "" if text.startswith(str(args[0])) else f"{args[0]}: "
        raise ConfigurationError(f"{name}{text}") from None


async def _check_channels(client: RedisClient) -> None:
    settings = client.settings
    # Use a unique channel: on another one, messages of other clients would be taken for answers.
    channel = f"{_KEY % settings.prefix}:{secrets.token_hex(8)}"
    _, connection = await client.listener()
    try:
        for name in ("SUBSCRIBE", "UNSUBSCRIBE"):
            try:
                await connection.call(name, channel)
            except ErrorReply as error:
                _, failure = classify(error)
                if not isinstance(failure, Misconfigured):
                    raise failure from None
                raise _denied(settings, f"{name} on channels") from None
    except Lost as lost:
        raise NotReached(lost.reason) from None
    finally:
        await connection.aclose()


async def _file_loads(client: RedisClient) -> bool:
    """Return whether every server is certain to have the rights to load its append-only file at its next start."""
    settings = client.settings
    key = _KEY % settings.prefix
    writes = [
        [key if name == "KEY" else name for name in args]
        for args in SCRIPT_COMMANDS
        if args[0] in _WRITE_COMMANDS
    ]

    async def may(ask: Ask) -> bool | None:
        info = parse_info(await ask(("INFO",)))
        if info.get("aof_enabled") != "1":
            return True
        product, version = _server(info)
        if not (7, 0) <= _numbers(version) < _LOADS_WITHOUT_RIGHTS[product]:
            return True
        try:
            replies = [await ask(("ACL", "DRYRUN", "default", *args)) for args in writes]
        except (Misconfigured, ScriptError):
            return None
        return all(reply == b"OK" for reply in replies)

    if not settings.user_name:
        return True  # the client is the default user, whose rights were just checked
    answers = await client.at_each_master(may)
    if False in answers:
        raise ConfigurationError(
            "this Redis would lose every task at its next start: it replays its append-only file as the user "
            f"'default', which lacks the permissions to do so. {_ALL_RIGHTS}"
        )
    return None not in answers


def _denied(settings: RedisSettings, what: str) -> ConfigurationError:
    prefix = settings.prefix
    change = "" if prefix == "tq" else f", with '{{{prefix}:' instead of '{{tq:'"
    return ConfigurationError(
        f"the Redis user may not {what} whose names begin with '{{{prefix}:': use the access list "
        f"taskqueue.acl that ships with taskqueue_redis{change}"
    )


def _warnings(*, append_only: bool, replicas: int, syncs: str, loads: bool) -> Iterable[str]:
    if not append_only:
        yield "appendonly is off: a restart of Redis loses all data; set 'appendonly yes'"
        if replicas:
            yield "a restart of a master without persistence empties its replicas too"
    elif syncs == "no":
        yield "appendfsync is no: a power cut loses data that was not yet written; set everysec or always"
    elif syncs == "unknown":
        yield (
            "cannot read appendfsync: set TASKQUEUE_REDIS_APPENDFSYNC to its value in redis.conf"
        )
    if not loads:
        yield (
            "cannot check whether Redis would lose every task at its next start, which happens "
            f"if the user 'default' lacks rights. {_ALL_RIGHTS}"
        )
