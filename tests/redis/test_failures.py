"""Classifying the errors of Redis: each known error has a policy, and errors of real servers are recognised."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from typing import Any

import pytest

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.connection import failures
from taskqueue_redis.connection.client import RedisClient
from taskqueue_redis.connection.failures import (
    RULES,
    ErrorReply,
    Failure,
    Lost,
    Misconfigured,
    NoScript,
    NotReached,
    Policy,
    Refused,
    Rule,
    ScriptError,
    classify,
    classify_connecting,
    normalised,
)
from tests.redis.backends import until
from tests.redis.conftest import MakeServer
from tests.redis.engines import Engine
from tests.redis.links import KEY, linked, raw
from tests.redis.servers import RedisServer, wait_until

SHA = "50142d1548e23223a2ffd158022e90f843339e5f"
AFTER = f" script: {SHA}, on @user_script:1."
AFTER_IN_VALKEY = " script: on @user_script:1."
BEFORE = f"ERR Error running script (call to f_{SHA}): "

SAMPLES = {
    "LOADING Redis is loading the dataset in memory": (Policy.WAIT, NotReached),
    "BUSY Redis is busy running a script.": (Policy.WAIT, NotReached),
    "TRYAGAIN Multiple keys request during rehashing of slot": (Policy.WAIT, NotReached),
    "CLUSTERDOWN The cluster is down": (Policy.SEEK, NotReached),
    "MASTERDOWN RedisClient with MASTER is down": (Policy.SEEK, NotReached),
    "READONLY You can't write against a read only replica.": (Policy.SEEK, NotReached),
    "UNBLOCKED force unblock from blocking operation": (Policy.SEEK, NotReached),
    "MOVED 3999 127.0.0.1:6381": (Policy.MOVED, NotReached),
    "ASK 3999 127.0.0.1:6381": (Policy.ASK, NotReached),
    "OOM command not allowed when used memory > 'maxmemory'.": (Policy.REFUSE, Refused),
    "MISCONF Errors writing to the AOF file: No space left on device": (Policy.REFUSE, Refused),
    "NOREPLICAS Not enough good replicas to write.": (Policy.REFUSE, Refused),
    "NOSCRIPT No matching script. Please use EVAL.": (Policy.LOAD, NoScript),
    "NOAUTH Authentication required.": (Policy.REPAIR, Misconfigured),
    "WRONGPASS invalid username-password pair": (Policy.REPAIR, Misconfigured),
    "NOPERM this user has no permissions to run the 'info' command": (Policy.REPAIR, Misconfigured),
    "DENIED Redis is running in protected mode": (Policy.REPAIR, Misconfigured),
    "WRONGTYPE Operation against a key holding": (Policy.RAISE, ScriptError),
    "CROSSSLOT Keys in request don't hash to the same slot": (Policy.REPAIR, Misconfigured),
    "NOPROTO unsupported protocol version": (Policy.REPAIR, Misconfigured),
    "NOGROUP No such key 'x'": (Policy.RAISE, ScriptError),
    "EXECABORT Transaction discarded": (Policy.RAISE, ScriptError),
    "ERR max number of clients reached": (Policy.WAIT, NotReached),
    "ERR unknown command `XYZ`, with args": (Policy.REPAIR, Misconfigured),
    "ERR unknown subcommand 'XYZ'": (Policy.REPAIR, Misconfigured),
    "ERR Unknown Redis command called from script": (Policy.REPAIR, Misconfigured),
    "ERR AUTH <password> called without any password configured": (Policy.RAISE, ScriptError),
    "ERR Client sent AUTH, but no password is set": (Policy.REPAIR, Misconfigured),
    "ERR invalid password": (Policy.REPAIR, Misconfigured),
    "ERR The user executing the script can't run this command": (Policy.REPAIR, Misconfigured),
    "ERR ACL failure in script: User x has no permissions": (Policy.REPAIR, Misconfigured),
    "ERR DB index is out of range": (Policy.REPAIR, Misconfigured),
    "ERR SELECT is not allowed in cluster mode": (Policy.REPAIR, Misconfigured),
    "ERR This instance has cluster support disabled": (Policy.REPAIR, Misconfigured),
    "ERR No such master with that name": (Policy.REPAIR, Misconfigured),
    "ERR syntax error": (Policy.RAISE, ScriptError),
    "BUSYGROUP Consumer Group name already exists": (Policy.RAISE, ScriptError),
    "NEVERSEEN what a later version may say": (Policy.RAISE, ScriptError),
    "no code at all": (Policy.RAISE, ScriptError),
    "": (Policy.RAISE, ScriptError),
}


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize(
    "form",
    ["{}", "{}" + AFTER, "{}" + AFTER_IN_VALKEY, BEFORE + "@user_script:1: @user_script: 1: -{}"],
)
def test_every_error_has_its_policy(text: str, form: str) -> None:
    """Every error has one policy, also if raised inside scripts of Redis 6.2, Redis 7.0 or Valkey 9.1."""
    policy, failure = classify(ErrorReply(form.format(text)))
    assert (policy, type(failure)) == SAMPLES[text]
    if isinstance(failure, Refused):
        assert failure.why == text.split(maxsplit=1)[0]
    if policy is not Policy.RAISE:
        assert "127.0.0.1" not in str(failure)


def test_every_line_of_the_table_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule of the table is used by some sample, so that no rule hides another."""
    reached: set[Rule] = set()
    real = failures._failure

    def noted(rule: Rule, rest: str) -> Failure:
        reached.add(rule)
        return real(rule, rest)

    monkeypatch.setattr(failures, "_failure", noted)
    for text in SAMPLES:
        classify(ErrorReply(text))
    assert reached == set(RULES)


@pytest.mark.parametrize(
    ("text", "code", "rest"),
    [
        ("TQ stale the receipt is not current", "stale", "the receipt is not current"),
        ("TQ stale", "stale", ""),
        (f"TQ stale why{AFTER}", "stale", "why"),
        (f"TQ stale why{AFTER_IN_VALKEY}", "stale", "why"),
        (f"ERR user_script:7: TQ stale why{AFTER_IN_VALKEY}", "stale", "why"),
        (f"{BEFORE}@user_script:12: TQ stale why", "stale", "why"),
        (f"{BEFORE}TQ stale why", "stale", "why"),
        (f"ERR user_script:7: TQ stale why{AFTER}", "stale", "why"),
        (f"ERR user_script:7: attempt to index{AFTER}", "ERR", "attempt to index"),
        (f"{BEFORE}@user_script:1: attempt to index", "ERR", "attempt to index"),
        (f"NOGROUP gone script: {SHA}x", "NOGROUP", f"gone script: {SHA}x"),
    ],
)
def test_what_our_own_scripts_raise(text: str, code: str, rest: str) -> None:
    """An error raised by our own Lua scripts keeps its code and text, in whatever form Redis reports it."""
    _, failure = classify(ErrorReply(text))
    assert isinstance(failure, ScriptError)
    assert (failure.code, failure.text) == (code, rest)


def test_normalising_takes_linear_time() -> None:
    """Normalising an error takes linear time, so that a malicious server cannot block the client with a long error."""
    for text in (
        " script: " * 50_000,
        "ERR user_script:" * 50_000,
        BEFORE + "@user_script:1: " * 50_000,
    ):
        assert len(normalised(text)) <= len(text)


@pytest.mark.parametrize(
    ("error", "policy"),
    [
        (ConnectionRefusedError(111, "Connection refused"), Policy.SEEK),
        (TimeoutError(), Policy.SEEK),
        (OSError("odd"), Policy.SEEK),
        (Lost("gone", sent=True), Policy.SEEK),
        (ssl.SSLError(1, "handshake"), Policy.SEEK),
        (ssl.SSLCertVerificationError(1, "self-signed"), Policy.REPAIR),
        (ConfigurationError("no"), Policy.REPAIR),
        (ErrorReply("ERR wrong number of arguments for 'auth' command"), Policy.REPAIR),
        (ErrorReply("LOADING"), Policy.WAIT),
    ],
)
def test_connections_that_cannot_be_made(error: Exception, policy: Policy) -> None:
    """Fault E9: whatever a connection attempt raises, the caller gets a `Failure` that says nothing was executed."""
    classified, failure = classify_connecting(error)
    assert classified is policy
    assert isinstance(failure, NotReached | Misconfigured)
    assert str(failure)


async def failing(link: RedisClient, *words: Any) -> Failure:
    """Run a command and return the failure that it raises."""
    with pytest.raises(Failure) as caught:
        await link.command(KEY, *words)
    return caught.value


@pytest.mark.oldest
async def test_errors_that_a_real_server_makes(each_redis: RedisServer, redis_prefix: str) -> None:
    """The errors of real servers are classified: wrong types, unknown commands, missing groups and missing scripts."""
    key = f"{redis_prefix}:k"
    async with linked(each_redis.url) as link:
        await link.command(key, "SET", key, 1)
        assert isinstance(await failing(link, "LPUSH", key, 1), ScriptError)
        assert isinstance(await failing(link, "NOSUCHCOMMAND"), Misconfigured)
        assert isinstance(await failing(link, "CLIENT", "NOSUCH"), Misconfigured | ScriptError)
        assert isinstance(await failing(link, "SELECT", 99_999), Misconfigured)
        assert isinstance(await failing(link, "CLUSTER", "SLOTS"), Misconfigured)
        assert isinstance(await failing(link, "EVALSHA", SHA, 0), NoScript)
        gone = await failing(link, "XREADGROUP", "GROUP", "g", "c", "STREAMS", f"{key}2", ">")
        assert isinstance(gone, ScriptError)
        assert gone.code == "NOGROUP"
        for script in (
            "return redis.call('LPUSH', KEYS[1], 1)",
            "return redis.pcall('LPUSH', KEYS[1], 1)",
        ):
            assert isinstance(await failing(link, "EVAL", script, 1, key), ScriptError)
        for script in (
            "return redis.error_reply('TQ stale not yours')",
            "return {err = 'TQ stale not yours'}",
            "error('TQ stale not yours')",
        ):
            own = await failing(link, "EVAL", script, 0)
            assert isinstance(own, ScriptError)
            assert (own.code, own.text) == ("stale", "not yours")
        async with raw(link) as call:
            await call("MULTI")
            with pytest.raises(ErrorReply):
                await call("NOSUCHCOMMAND")
            with pytest.raises(ErrorReply) as aborted:
                await call("EXEC")
            assert isinstance(classify(aborted.value)[1], ScriptError)


WRITES = (
    ("SET", "k", 1),
    ("EVAL", "return redis.call('SET', KEYS[1], 1)", 1, "k"),
    ("EVAL", "return redis.pcall('SET', KEYS[1], 1)", 1, "k"),
)


async def test_stores_that_take_no_writes(make_server: MakeServer, each_engine: Engine) -> None:
    """Faults B7, B8 and C3: OOM, MISCONF and NOREPLICAS refuse a write at once, also in scripts, while reads work."""
    server = make_server(each_engine, aof=False).start()
    async with linked(server.url) as link:
        for why, spoil, mend in (
            ("OOM", ("maxmemory", "1"), ("maxmemory", "0")),
            ("NOREPLICAS", ("min-replicas-to-write", "1"), ("min-replicas-to-write", "0")),
        ):
            server.call("CONFIG", "SET", *spoil)
            for words in WRITES:
                refused = await failing(link, *words)
                assert isinstance(refused, Refused)
                assert refused.why == why
                assert link.trouble.text is not None
            assert await link.command(KEY, "GET", "k") is None
            server.call("CONFIG", "SET", *mend)
            assert await link.command(KEY, "SET", "k", 1) == b"OK"
            assert link.trouble.text is None
            server.call("DEL", "k")
        shutil.rmtree(server.folder)
        server.call("CONFIG", "SET", "save", "900 1")
        server.call("BGSAVE")
        wait_until(lambda: server.info()["rdb_last_bgsave_status"] == "err", "the save fails")
        for words in WRITES:
            refused = await failing(link, *words)
            assert isinstance(refused, Refused)
            assert refused.why == "MISCONF"


async def test_a_master_that_becomes_a_replica(
    make_server: MakeServer, each_engine: Engine
) -> None:
    """Fault C5: READONLY, MASTERDOWN and UNBLOCKED errors of a demoted master are retried, also from within scripts."""
    server = make_server(each_engine, config={"repl-ping-replica-period": "1"}).start()
    async with linked(server.url) as link, raw(link) as call:
        await link.command(KEY, "XGROUP", "CREATE", "x", "g", "$", "MKSTREAM")
        block = ("XREADGROUP", "GROUP", "g", "c", "BLOCK", 0, "STREAMS", "x", ">")
        waiting = asyncio.ensure_future(call(*block))
        await asyncio.to_thread(
            wait_until, lambda: server.info()["blocked_clients"] == "1", "the read blocks"
        )
        server.call("REPLICAOF", "127.0.0.1", 1)
        with pytest.raises(ErrorReply) as unblocked:
            await waiting
        assert classify(unblocked.value)[0] is Policy.SEEK
        writes = [asyncio.create_task(link.command(KEY, *words)) for words in WRITES]
        await troubled(link, "READONLY")
        server.call("CONFIG", "SET", "replica-serve-stale-data", "no")
        await troubled(link, "MASTERDOWN")
        server.call("REPLICAOF", "NO", "ONE")
        assert await asyncio.gather(*writes) == [b"OK"] * 3
        assert link.trouble.text is None


async def troubled(link: RedisClient, word: str) -> None:
    """Wait until the link reports this error as its trouble."""
    await until(lambda: word in (link.trouble.text or ""), f"the link tells of {word}")


async def test_a_server_that_is_busy(make_server: MakeServer, each_engine: Engine) -> None:
    """Fault B14: while another client's endless script blocks the server, calls wait and the link reports BUSY.

    The script is not killed by this client.
    """
    server = make_server(each_engine, config={"lua-time-limit": "20"}).start()
    async with linked(server.url) as link, raw(link) as call:
        endless = asyncio.ensure_future(call("EVAL", "while true do end", 0))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(link.command(KEY, "PING"))
        await troubled(link, "BUSY")
        await asyncio.to_thread(server.call, "SCRIPT", "KILL")
        assert await waiting == b"PONG"
        with pytest.raises(ErrorReply):
            await endless


async def test_a_server_that_is_loading(make_server: MakeServer) -> None:
    """Fault B11: while a server loads its data, calls wait."""
    # While it loads, the server answers clients only once per 2 MB.
    slow = {"key-load-delay": "10000", "rdbcompression": "no"}
    server = make_server(aof=False, config=slow).start()
    for n in range(40):
        server.call("SET", f"k{n}", "x" * 250_000)
    server.call("SAVE")
    server.kill()
    server.start(wait=False)
    async with linked(server.url) as link:
        waiting = asyncio.create_task(link.command(KEY, "DBSIZE"))
        await troubled(link, "LOADING")
        assert await waiting == 40


async def test_a_server_without_connections_left(make_server: MakeServer) -> None:
    """Fault B17: if a server has no free connections, calls wait until another client disconnects."""
    server = make_server(config={"maxclients": "2"}).start()
    with contextlib.closing(server.connect()), contextlib.closing(server.connect()) as second:
        async with linked(server.url) as link:
            waiting = asyncio.create_task(link.command(KEY, "PING"))
            await troubled(link, "maxclients")
            second.close()
            assert await waiting == b"PONG"


async def test_wrong_secrets_and_rights(
    make_server: MakeServer, each_engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault E9: a missing or wrong password, or a missing right, raises a clear error at once, without the secret."""
    server = make_server(each_engine, config={"requirepass": "open-sesame"}).start()
    server.login = ("default", "open-sesame")
    server.call("ACL", "SETUSER", "poor", "on", ">open-sesame", "~a*", "+get")
    place = server.url.rpartition("@")[2]
    for url, words, cure in (
        (f"redis://{place}", ("GET", "a"), "asks for a password"),
        (f"redis://:canary@{place}", ("GET", "a"), "does not accept the user and password"),
        (f"redis://poor:canary@{place}", ("GET", "a"), "does not accept the user and password"),
        (f"redis://poor:open-sesame@{place}", ("SET", "a", 1), "SET: the Redis user lacks a right"),
        (f"redis://poor:open-sesame@{place}", ("GET", "b"), "the Redis user lacks a right"),
        (f"redis://poor:open-sesame@{place}/1", ("GET", "a"), "lacks a right"),
    ):
        async with linked(url) as link:
            failure = await failing(link, *words)
            assert isinstance(failure, Misconfigured)
            assert cure in str(failure)
            assert link.trouble.text == str(failure)
            assert "canary" not in f"{failure!r} {caplog.text}"
    async with linked(f"redis://poor:open-sesame@{place}") as link:
        # The link works although this user may not set the name of its connection.
        assert await link.command(KEY, "GET", "a") is None
