"""Checking the Redis server at startup: unsuitable servers are refused with a remedy, risky settings are reported."""

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
from taskqueue_redis.connection.client import RedisClient
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
    """Check a server and return the facts about it."""
    async with linked(url, **values) as link:
        return await check_server(link)


async def refused(url: str, **values: Any) -> str:
    """Assert that a server is refused, and return the error message."""
    with pytest.raises(ConfigurationError) as caught:
        await checked(url, **values)
    return str(caught.value)


@pytest.mark.oldest
async def test_a_server_that_is_fine(each_redis: RedisServer) -> None:
    """For a suitable server, the check returns its product, version, mode and persistence, and no warnings."""
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
    """The facts about a server, which the health status shows, contain no password."""
    server = make_server(config={"requirepass": "canary"}).start()
    server.login = ("default", "canary")
    facts = await checked(server.url)
    assert "canary" not in f"{facts} {facts.details()}"


async def test_what_is_refused_and_doubted(make_server: MakeServer, each_engine: Engine) -> None:
    """Fault B9: a memory policy that evicts keys is refused; missing persistence or syncs give a warning."""
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
    """Fault B9: a replica is refused.

    For a master without persistence, a warning says that a restart empties its replicas.
    """
    master, replica = make_server(each_engine, aof=False).start(), make_server(each_engine).start()
    follow(replica, master)
    assert "read-only replica" in await refused(replica.url)
    facts = await checked(master.url)
    assert facts.replicas == 1
    assert any("empties its replicas" in warning for warning in facts.warnings)


class _Old(RedisClient):
    """A link whose server claims to be an old version."""

    version = b"6.0.20"

    async def everywhere(self, *words: Any, quietly: bool = False) -> list[Any]:
        """Return the replies with the version replaced."""
        told = await super().everywhere(*words, quietly=quietly)
        return [re.sub(rb"redis_version:.*", b"redis_version:" + self.version, one) for one in told]


async def test_old_versions(redis_server: RedisServer) -> None:
    """Redis 6.0 is refused with an error that names the required version."""
    link = _Old(settings_for(redis_server.url))
    try:
        with pytest.raises(
            ConfigurationError, match=r"Redis 6\.0\.20 is too old: use 6\.2 or later"
        ):
            await check_server(link)
    finally:
        await link.aclose()


async def test_clusters_need_their_url(redis_cluster: Cluster, redis_server: RedisServer) -> None:
    """A cluster node needs a cluster URL, and a single server must not have one."""
    facts = await checked(redis_cluster.url)
    assert (facts.mode, facts.masters) == ("cluster", 3)
    assert "redis+cluster://" in await refused(redis_cluster.masters[0].url)
    url = redis_server.url.replace("redis://", "redis+cluster://")
    assert "use a redis:// URL" in await refused(url)


def test_the_access_list_that_ships() -> None:
    """The ACL file of the package grants exactly the commands that are used.

    Its unchanged password hash lets no user in.
    """
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
    """With the rights of the ACL file, the check passes for its own prefix only.

    Settings that Redis hides from this user can be declared.
    """
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
    """Law 1, faults B1 and E9: with the ACL file in force, Redis still loads its append-only file after a restart."""
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
    """Law 1, fault E9: Redis 7.0 loses all tasks at a restart if its default user may not run the logged commands.

    Such a server is refused with a remedy; if the check is not possible, it gives a warning.
    """
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
"""rights without which the check only warns"""


async def test_every_missing_right_is_named(make_server: MakeServer, each_engine: Engine) -> None:
    """Fault E9: if any required right is missing, the startup check fails and names the right and the remedy."""
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
    """Fault E9: with TLS, the signer and the host name of the certificate are verified."""
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
        assert "is not trusted" in await refused(url, tls_ca_file=stranger)
        wrong = f"rediss://127.1:{port}"  # the same server, under a name that its certificate lacks
        rest = {"allow_plaintext": True, "tls_ca_file": trusted}
        assert "is not trusted" in await refused(wrong, **rest)
        assert (await checked(url, dangerously_skip_tls_verification=True)).masters == 1
        with pytest.raises(NotReached):
            await checked(f"redis://127.0.0.1:{port}", operation_timeout=0.3)
