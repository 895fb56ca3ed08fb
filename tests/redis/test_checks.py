"""The check at the start: what cannot keep a promise is refused with the cure, and what is doubtful is named."""

from __future__ import annotations

import asyncio
import re
import ssl
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import trustme

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.connection.client import Link
from taskqueue_redis.connection.failures import NotReached
from taskqueue_redis.setup.checks import ServerFacts, check_server
from taskqueue_redis.setup.permissions import CLIENT_COMMANDS, SCRIPT_COMMANDS, access_list
from tests.chaos.proxy import FaultProxy
from tests.redis.backends import KEY, opened, publish, take
from tests.redis.clusters import Cluster, follow
from tests.redis.conftest import MakeServer
from tests.redis.engines import Engine
from tests.redis.links import linked, settings_for
from tests.redis.servers import RedisServer


async def checked(url: str, **values: Any) -> ServerFacts:
    """Check a server."""
    async with linked(url, **values) as link:
        return await check_server(link)


async def refused(url: str, **values: Any) -> str:
    """Check a server that is to be refused; return why."""
    with pytest.raises(ConfigurationError) as caught:
        await checked(url, **values)
    return str(caught.value)


@pytest.mark.oldest
async def test_a_server_that_is_fine(each_redis: RedisServer) -> None:
    """The facts are right, and fit for health."""
    facts = await checked(each_redis.url)
    assert (
        f"{facts.product.lower()} {facts.version}"
        == f"{each_redis.engine.product} {each_redis.engine.release}"
    )
    assert (facts.mode, facts.masters, facts.replicas, facts.maxmemory) == ("single", 1, 0, 0)
    assert (facts.append_only, facts.appendfsync, facts.warnings) == (True, "everysec", ())
    details = facts.details()
    assert details["redis_version"] == facts.version
    assert details["redis_warnings"] is None
    assert each_redis.call("KEYS", "*:check") == []


async def test_no_secret_is_among_the_facts(make_server: MakeServer) -> None:
    """What health shows has no password in it."""
    server = make_server(config={"requirepass": "canary"}).start()
    server.login = ("default", "canary")
    facts = await checked(server.url)
    assert "canary" not in f"{facts} {facts.details()}"


async def test_what_is_refused_and_doubted(make_server: MakeServer, each_engine: Engine) -> None:
    """Fault B9: a policy that evicts is refused; missing persistence and unsynced files are named."""
    server = make_server(each_engine).start()
    for policy in ("allkeys-lru", "volatile-ttl"):
        server.call("CONFIG", "SET", "maxmemory-policy", policy)
        assert "maxmemory-policy noeviction" in await refused(server.url)
    server.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    for sync, warns in (("no", True), ("always", False)):
        server.call("CONFIG", "SET", "appendfsync", sync)
        facts = await checked(server.url)
        assert (facts.appendfsync, bool(facts.warnings)) == (sync, warns)
    server.call("CONFIG", "SET", "appendonly", "no")
    (warning,) = (await checked(server.url)).warnings
    assert "appendonly yes" in warning


async def test_replicas(make_server: MakeServer, each_engine: Engine) -> None:
    """Fault B9: a replica is refused and its master taken; one without persistence puts its replicas at risk."""
    master, replica = make_server(each_engine, aof=False).start(), make_server(each_engine).start()
    follow(replica, master)
    assert "read-only replica" in await refused(replica.url)
    facts = await checked(master.url)
    assert facts.replicas == 1
    assert any("empties its replicas" in warning for warning in facts.warnings)


class _Old(Link):
    """A link to a server that says it is an old one."""

    version = b"6.0.20"

    async def everywhere(self, *words: Any, quietly: bool = False) -> list[Any]:
        """Answer INFO in its stead."""
        told = await super().everywhere(*words, quietly=quietly)
        return [re.sub(rb"redis_version:.*", b"redis_version:" + self.version, one) for one in told]


async def test_old_versions(redis_server: RedisServer) -> None:
    """Redis 6.0 is refused with the version that is needed."""
    link = _Old(settings_for(redis_server.url))
    try:
        with pytest.raises(
            ConfigurationError, match=r"Redis 6\.0\.20 is too old: use 6\.2 or later"
        ):
            await check_server(link)
    finally:
        await link.aclose()


async def test_clusters_need_their_url(redis_cluster: Cluster, redis_server: RedisServer) -> None:
    """A node of a cluster is not used as a single server, nor the other way round."""
    facts = await checked(redis_cluster.url)
    assert (facts.mode, facts.masters) == ("cluster", 3)
    assert "redis+cluster://" in await refused(redis_cluster.masters[0].url)
    url = redis_server.url.replace("redis://", "redis+cluster://")
    assert "use a redis:// URL" in await refused(url)


def test_the_access_list_that_ships() -> None:
    """The file is what the list of commands says, and lets nobody in as it is."""
    shipped = (resources.files("taskqueue_redis") / "taskqueue.acl").read_text()
    assert shipped == access_list("tq")
    assert " -@all " in shipped
    assert f" #{'0' * 64} " in shipped
    assert "user default off ~* &* +@all\n" in shipped
    (rules,) = (line.split() for line in shipped.splitlines() if line.startswith("user taskqueue"))
    for forbidden in ("keys", "flushall", "flushdb", "config", "acl", "debug", "scan", "shutdown"):
        assert f"+{forbidden}" not in rules


@pytest.mark.oldest
async def test_the_access_list_suffices(make_server: MakeServer, each_engine: Engine) -> None:
    """Under the list that ships all is well, for its prefix; what Redis keeps secret may be declared."""
    server = make_server(each_engine, acl=access_list("mine", password=">pw")).start()
    server.login = ("taskqueue", "pw")
    facts = await checked(server.url, prefix="mine")
    assert facts.appendfsync == "unknown"
    assert "TASKQUEUE_REDIS_APPENDFSYNC" in facts.warnings[0]
    facts = await checked(server.url, prefix="mine", appendfsync="always")
    assert (facts.appendfsync, facts.warnings) == ("always", ())
    assert "lacks a right" in await refused(server.url, prefix="other")


async def test_tasks_outlive_a_restart_under_it(
    make_server: MakeServer, each_engine: Engine, redis_prefix: str
) -> None:
    """Law 1, faults B1 and E9: what the list forbids does not keep Redis from loading its own file."""
    server = make_server(each_engine, acl=access_list(redis_prefix, password=">pw")).start()
    server.login = ("taskqueue", "pw")
    async with opened(server.url, redis_prefix) as backend:
        await publish(backend, "a", "b")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        async with backend.subscribe([KEY], "c") as subscription:
            assert [one.task.id for one in await take(subscription, 2)] == ["a", "b"]


@pytest.mark.parametrize("rights", ["", "~* &* -@all +hset", "~* &* +@all -@stream"])
async def test_a_default_user_that_could_not_load_the_file(
    make_server: MakeServer, each_engine: Engine, rights: str
) -> None:
    """Law 1, fault E9: Redis 7.0 would begin empty at its next start: refused with the cure, or said to be unknown."""
    rules = access_list("tq", password=">pw").replace("~* &* +@all", rights)
    server = make_server(each_engine, acl=f"{rules}user root on >pw ~* &* +@all\n").start()
    server.login = ("root", "pw")
    url = server.url.replace("root:", "taskqueue:")
    affected = (7, 0) <= each_engine.version < (9, 1, 2)
    for user in (url, server.url):
        if affected:
            assert "ACL SETUSER default ~* &* +@all" in await refused(user)
        else:
            await checked(user)
    server.call("ACL", "SETUSER", "taskqueue", "-acl|dryrun" if affected else "-acl")
    told = [warning for warning in (await checked(url)).warnings if "lose every task" in warning]
    assert len(told) == affected
    server.call("ACL", "SETUSER", "default", "~*", "&*", "+@all")
    assert not any("lose every task" in told for told in (await checked(server.url)).warnings)


_UNUSED_HERE = {"SELECT", "CLIENT SETNAME", "CLUSTER SLOTS", "ASKING", "ROLE", "XREVRANGE"}
_DISPENSABLE = {"BGREWRITEAOF", "ACL DRYRUN"}
"""without which a warning says what to do by hand, or that something is not known"""


async def test_every_missing_right_is_named(make_server: MakeServer, each_engine: Engine) -> None:
    """Fault E9: whichever right is missing, the start ends with its name and the cure."""
    full = access_list("tq", password=">pw")
    server = make_server(each_engine, acl=f"{full}user root on >pw ~* &* +@all\n").start()
    server.login = ("root", "pw")
    rules = full.splitlines()[1].split()[2:]
    needed = set(CLIENT_COMMANDS) - _UNUSED_HERE - _DISPENSABLE
    names = {words[0] for words in SCRIPT_COMMANDS} | needed
    url = server.url.replace("root:", "taskqueue:")
    with server.connect() as root:
        for name in sorted(names):
            right = f"+{name.lower().replace(' ', '|')}"
            assert right in rules
            root.call(
                "ACL", "SETUSER", "taskqueue", "reset", *(rule for rule in rules if rule != right)
            )
            why = await refused(url)
            assert name.split(" ", maxsplit=1)[0].removesuffix("SHA") in why.upper()
            assert "ACL" in why or "taskqueue.acl" in why
        for pattern, what in (("~{tq:*", "right"), ("&{tq:*", "PUBLISH")):
            root.call(
                "ACL", "SETUSER", "taskqueue", "reset", *(rule for rule in rules if rule != pattern)
            )
            assert what in await refused(url)


async def test_tls(redis_server: RedisServer, tmp_path: Path) -> None:
    """Fault E9: with TLS the certificate is checked: who signed it, and for which name."""
    trusted, stranger = tmp_path / "trusted.pem", tmp_path / "stranger.pem"
    authority = trustme.CA()
    authority.cert_pem.write_to_path(trusted)
    trustme.CA().cert_pem.write_to_path(stranger)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    async with FaultProxy(("127.0.0.1", redis_server.port), tls=context) as terminator:
        port = terminator.address[1]
        url = f"rediss://127.0.0.1:{port}"
        assert (await checked(url, tls_ca_file=trusted)).mode == "single"
        assert "TASKQUEUE_REDIS_TLS_CA_FILE" in await refused(url)
        assert "not to be trusted" in await refused(url, tls_ca_file=stranger)
        wrong = f"rediss://127.1:{port}"  # the same place; the certificate lacks this name
        rest = {"allow_plaintext": True, "tls_ca_file": trusted}
        assert "not to be trusted" in await refused(wrong, **rest)
        assert (await checked(url, dangerously_skip_tls_verification=True)).masters == 1
        with pytest.raises(NotReached):
            await checked(f"redis://127.0.0.1:{port}", operation_timeout=0.3)
