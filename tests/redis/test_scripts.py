"""Static checks of the Lua scripts: allowed commands, loops that end, and keys of a single partition only."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import random
import re
from contextlib import AsyncExitStack
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from taskqueue_core.after import After, TaskRef
from taskqueue_core.capabilities import (
    AuditEntry,
    Endpoint,
    Fire,
    Left,
    QueueSettings,
    Run,
    Seen,
    Skip,
    StoredSchedule,
)
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import LeaseLost
from taskqueue_core.tasks import State, Task
from taskqueue_redis import RedisBackend
from taskqueue_redis.scripts.assembly import source
from taskqueue_redis.scripts.runner import Partitions
from taskqueue_redis.setup.permissions import (
    CLIENT_COMMANDS,
    SCRIPT_COMMANDS,
    access_list,
    rights_in_lua,
)
from tests.redis.backends import PATIENCE, opened, publish, take, until
from tests.redis.carrying import carry
from tests.redis.conftest import MakeServer
from tests.redis.servers import RedisServer
from tests.redis.test_books import Workload

FOLDER = resources.files("taskqueue_redis") / "lua"
NAMES = sorted(
    path.name.removesuffix(".lua") for path in FOLDER.iterdir() if path.name.endswith(".lua")
)
PARTS = sorted(path.name.removesuffix(".lua") for path in (FOLDER / "lib").iterdir())
CALL = re.compile(
    r"\b(?:redis\.p?call|call|of_group)\(\s*(?!\.\.\.)(?:'(\w+)'(?:,\s*'([A-Z]+)')?)?"
)
KEYS = (
    "KEYS[1]",
    "PARTITION ..",
    "META",
    "SCHEDULES",
    "SPECS",
    "DUE",
    "NAMES",
    "JOURNAL",
    "q.name",
    "name",
    "meta",
    "consumer",
    "owns",
    "list",
    "stream_of(",
    "lane_of(",
    "bound.name",
    "p.name",
    "POOL",
    "JOBS",
    "LAPSES",
    "NOTES",
    "LATE",
    "DATES",
    "OUTBOX",
    "LINES",
    "KIN",
    "ENDS",
    "BATCHES",
)
"""how the key arguments in scripts begin; each of these is the partition or starts with it"""
CONTAINERS = {"XGROUP", "XINFO"}


def code(name: str) -> str:
    """Return the source of a script without its comments and without the check of rights."""
    return re.sub(r"--[^\n]*", "", source(name).replace(rights_in_lua("META"), "true"))


def commands(text: str) -> set[str]:
    """Return the commands that a script calls; each call must name its command literally."""
    found = set()
    for match in CALL.finditer(text):
        assert match[1], f"a command that is not named: {match[0]}"
        word = match[1]
        found.add(f"{word} {match[2]}" if word in CONTAINERS else word)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_allowed(name: str) -> None:
    """E6, fault E9: every command called by a script is literal and granted by the ACL file."""
    allowed = {
        f"{words[0]} {words[1]}" if words[0] in CONTAINERS else words[0]
        for words in SCRIPT_COMMANDS
    }
    assert commands(code(name)) <= allowed


def test_no_command_is_allowed_without_need() -> None:
    """The ACL file grants only commands that are used, and none that scans or empties the whole store."""
    used = {word.split()[0] for name in NAMES for word in commands(code(name))}
    assert used == {words[0] for words in SCRIPT_COMMANDS}
    granted = set(re.findall(r"\+(\S+)", access_list("tq").splitlines()[1]))
    assert granted == {name.lower().replace(" ", "|") for name in {*used, *CLIENT_COMMANDS}}
    assert not granted & {"keys", "scan", "flushall", "flushdb", "config", "xtrim", "swapdb"}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_trimmed_or_forgotten_unseen(name: str) -> None:
    """D15, law 1: no script trims a stream of tasks, and group members are removed only without pending entries.

    Only the journal, the audit log and the events of tasks have a maximum length. A group skips only entries that are
    in a sorted lane or in flight.
    """
    text = code(name)
    for line in text.splitlines():
        if "MAXLEN" in line or "MINID" in line:
            assert "JOURNAL" in line or "':audit'" in line or "limits_of(q)" in line
        assert not re.search(r"'(XTRIM|XSETID|NOACK|BLOCK)'", line)
    for place in (match.start() for match in re.finditer(r"[^n] move_on\(", text)):
        behind = text[place - 300 : place]
        assert "q.waiting > 0 or" in behind or "enter_lane(q, r, kind" in behind
    if "DELCONSUMER" in text:
        before = text[: text.index("DELCONSUMER")]
        assert "if budget <= 0 or bytes >= 4194304 then return taken, budget, false end" in before


@pytest.mark.parametrize("name", NAMES)
def test_loops_end(name: str) -> None:
    """X6, rule 5: every loop in a script is bounded, and no script waits."""
    text = code(name)
    assert not re.search(r"\brepeat\b|\bgoto\b|while true", text)
    for condition in re.findall(r"\bwhile\b(.*?)\bdo\b", text, re.DOTALL):
        assert re.search(r"[<>]=?", condition), condition
    for loop in re.findall(r"\bfor\b(.*?)\bdo\b", text, re.DOTALL):
        assert re.search(r"=[^,]+,|\bi?pairs\(|string\.gmatch\(", loop), loop
    # Data that grow with a queue must be read in pieces, and are freed in the background.
    assert not re.search(r"'DEL', q\.name \.\. '/[^fW]", text)
    for line in text.splitlines():
        for call in re.findall(r"call\('ZRANGEBYSCORE'.*", line):
            assert "'LIMIT'" in call, line
        for call in re.findall(r"call\('XRANGE'.*", line):
            assert "'COUNT'" in call or re.search(r"(\S+), \1\)", call), line
        for call in re.findall(r"call\('LRANGE'.*", line):
            assert "budget" in call or "from, from + 99)" in call, line
        for call in re.findall(r"call\('HGETALL'.*", line):
            bounded = (
                "q.name)",
                "p.name)",
                "POOL",
                "'/w:' .. id)",
            )  # the last one: up to 1000 parents
            assert any(name in call for name in bounded), line
    assert not re.search(r"'(HKEYS|HVALS|SMEMBERS)', (?!PARTITION|owns)", text)


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_built_from_the_partition(name: str) -> None:
    """D18, rule 21: all keys of a script are built from its partition, never from its other arguments."""
    text = code(name)
    assert "KEYS[2]" not in text
    for words in re.findall(r"call\('(?!TIME)\w+', ([^\n]*)", text):
        key = re.sub(r"^('[^']*', )*(token, 'COUNT', count, 'STREAMS', )?", "", words)
        assert key.startswith(KEYS), words
    assert re.findall(r"KEYS\[1\]", text), "it is given its partition"


def test_parts_are_used() -> None:
    """Every library file is included by a script, and every script is used by the Python code."""
    heads = {
        word
        for name in NAMES
        for word in (FOLDER / f"{name}.lua").read_text().split("\n")[0].split()
    }
    assert {part.removesuffix(".lua") for part in PARTS} <= heads
    package = resources.files("taskqueue_redis")
    python = "".join(path.read_text() for path in Path(str(package)).rglob("*.py"))
    for name in NAMES:
        assert f'"{name}"' in python, f"nobody runs {name}"


@pytest.mark.oldest
def test_each_script_loads(each_redis: RedisServer) -> None:
    """D13, fault M6: each engine compiles each script, under the hash with which the client calls it."""
    with each_redis.connect() as connection:
        for name in NAMES:
            text = source(name)
            digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
            assert connection.call("SCRIPT", "LOAD", text).decode() == digest


async def test_scripts_keep_to_their_partition(make_server: MakeServer, redis_prefix: str) -> None:
    """D18: MONITOR shows that every command of every script uses only keys and channels of its own partition."""
    clock = ManualClock(1_700_000_000.0)
    with make_server() as server, server.connect() as monitor:
        monitor.call("MONITOR")
        async with AsyncExitStack() as opening:
            backend = await opening.enter_async_context(
                opened(server.url, redis_prefix, clock=clock, partitions=4)
            )
            await everything(Workload(backend, clock, random.Random(7)))
            await every_transition_of_slots(backend)
            await every_step_of_schedules(backend)
            await backend.audit.record(AuditEntry(actor="ops", action="purge"))
            assert await backend.audit.entries()
        server.call("PING", "the end")
        owner, seen, digests = "", 0, set()
        for words in iter(lambda: monitored(monitor._reader.readline()), ["PING", "the end"]):
            if words[0] in {"EVALSHA", "EVAL"}:
                owner = words[3]
                text = ast.literal_eval(f'b"{words[1]}"')  # MONITOR escapes bytes as Python does
                digests.add(
                    words[1]
                    if words[0] == "EVALSHA"
                    else hashlib.sha1(text, usedforsecurity=False).hexdigest()
                )
            elif words[0] == "lua":
                touched = named(words[1:])
                seen += 1
                assert all(name == owner or name.startswith(f"{owner}:") for name in touched), words
        assert seen > 5000
        called = {
            hashlib.sha1(source(n).encode(), usedforsecurity=False).hexdigest() for n in NAMES
        }
        assert called - digests == set(), [
            n
            for n in NAMES
            if hashlib.sha1(source(n).encode(), usedforsecurity=False).hexdigest() not in digests
        ]


async def everything(workload: Workload) -> None:
    """Run each script of the queues at least once."""
    backend = workload.backend
    for _ in range(300):
        verb = workload.chance.choice(workload.verbs)
        try:
            await verb()
        except LeaseLost:
            continue
    control = backend.control
    for times in (60, 0):
        for key in ("alpha", "beta"):
            settings = await control.settings(key)
            await control.configure(key, QueueSettings(version=settings.version, journal=True))
        for _ in range(times):
            try:
                await workload.chance.choice(workload.verbs)()
            except LeaseLost:
                continue
    consumer = backend.subscribe(["alpha"], "c")
    await publish(backend, "last", priority=9, key="alpha")
    (delivery,) = await take(consumer, 1, limit=1)
    consumer._receiver._mark_uncertain(backend._context.scripts.partitions.of("alpha"))
    await consumer.receive(1, 0)
    await consumer.dead_letter(delivery, "why")
    await control.workers()
    await control.queues()
    await control.results("alpha", "1")
    await control.statuses("alpha", "1")
    await backend.dead_letters.list("alpha")
    for state in State:
        await backend.listing.tasks("alpha", state=state)
    await backend.listing.task("alpha", "1")
    await erase(backend)
    await backend.health()
    await publish(backend, "gone", key="delta")
    await control.purge("delta")
    await control.delete("delta")
    batch = TaskRef("alpha", "batch")
    absent = After(tasks=(TaskRef("alpha", "absent"),))
    await backend.publisher.publish(
        Task(key="alpha", id="batch", batch=batch), Task(key="beta", id="waits", after=absent)
    )
    assert await backend.dependencies.close(batch)
    assert await carry(backend.dependencies) > 1
    while (await consumer.receive(1000, 0)).deliveries:
        pass
    due = Task(key="alpha", id="due", not_before=workload.clock.now() + 1)
    await backend.publisher.publish(due)
    waiting = asyncio.create_task(consumer.receive(1000, None))
    await until(lambda: consumer.asleep or waiting.done(), "it waits")
    await workload.clock.advance(2)
    await asyncio.wait_for(waiting, PATIENCE)
    scripts = backend._context.scripts
    for partition in scripts.partitions.names:
        await scripts.run("repair", partition, 0)
        await scripts.run("beat", partition, consumer.token)  # without waiting for its interval


async def erase(backend: RedisBackend) -> None:
    """Erase a task by its tag."""
    settings = await backend.control.settings("alpha")
    await backend.control.configure("alpha", settings.model_copy(update={"index": ("user",)}))
    await backend.publisher.publish(Task(key="alpha", id="tagged", tags=("user:1",)))
    assert (await backend.listing.erase("alpha", "user:1")).count == 1


async def every_transition_of_slots(backend: RedisBackend) -> None:
    """Run each script of the slot pool at least once, in all of its cases."""
    slots = backend.slots
    for model in ("m", "another model"):
        for server in ("a", "b"):
            await slots.register(
                Endpoint(model=model, server=server, url="http://a/", slots=2, together=3)
            )
            await slots.reconcile(model, server, Seen(active=0), settled=0)
    first, second, third = await slots.acquire("m", "h", ttl=5, limit=3)
    bound, more, resumed = await slots.assign((first, "1"), (second, "2"), (third, "1"), ttl=5)
    assert bound is not None
    assert more is not None
    assert resumed is not None
    await slots.detach(more, ttl=5)
    await slots.renew(resumed, msgspec.structs.replace(more, job="3", token="earlier.1.1"), ttl=5)
    assert await slots.leave("m", "1", resumed.token, b"1") is Left.TAKEN
    assert await slots.leave("m", "1", first.token, b"1") is Left.LATE
    assert await slots.late("m", "1") == (b"1",)
    for _ in range(2):
        await slots.reconcile("m", "a", Seen(active=0), settled=0)
    (taken,) = await slots.acquire("m", "h", ttl=5, idle=0.0)
    await slots.acquire("m", "h", ttl=5, releasing=[taken])
    await slots.release(more)
    await slots.rest("m", "a", 1)
    await slots.remove("another model", "a")
    await slots.configure("m", b"{}")
    await slots.documents()
    await slots.inspect()


async def every_step_of_schedules(backend: RedisBackend) -> None:
    """Run each script of the schedules at least once."""
    schedules, at = backend.schedules, backend.now()
    for name in ("a", "b"):
        await schedules.put(StoredSchedule(key=f"{name}-queue", name=name, spec=b"{}", next_at=at))
    due = (await schedules.due(9)).schedules
    for schedule in due:
        task = Task(key=schedule.key, id=f"{schedule.name}.1")
        fire = Fire(
            key=schedule.key,
            name=schedule.name,
            version=schedule.version,
            planned_for=schedule.next_at,
            runs=(Run(at, task),),
            skipped=(Skip(at - 1, "late"),),
            next_at=at + 60,
        )
        for stale in (False, True):
            assert [done.stale for done in await schedules.fire(fire)] == [stale]
    assert {one.name for one in await schedules.list()} >= {"a", "b"}
    assert await schedules.delete("a-queue", "a")


def monitored(line: bytes) -> list[str]:
    """Return the words of a command shown by MONITOR, preceded by "lua" if a script called it."""
    text = line.decode("utf-8", "replace")
    words = re.findall(r'"((?:[^"\\]|\\.)*)"', text)
    return ["lua", *words] if re.search(r"\[\d+ lua\]", text) else words


def named(words: list[str]) -> list[str]:
    """Return the keys and channels that a command uses."""
    match words[0].upper():
        case "TIME":
            return []
        case "XREADGROUP":
            start = words.index("STREAMS") + 1
            return words[start : start + (len(words) - start) // 2]
        case "XGROUP" | "XINFO":
            return [words[2]]
        case "DEL" | "EXISTS" | "SINTER":
            return words[1:]
        case _:
            return [words[1]]


def test_partitions() -> None:
    """D18, rule 21: all names of a partition have the same hash tag, and a queue is always in the same partition."""
    partitions = Partitions("tq", 8)
    assert partitions.names == tuple(f"{{tq:{n}}}" for n in range(8))
    keys = tuple(f"key-{n}" for n in range(1000))
    grouped = partitions.group(keys)
    assert sorted(key for some in grouped.values() for key in some) == sorted(keys)
    assert min(map(len, grouped.values())) > 60
    assert all(partitions.of(key) == name for name, some in grouped.items() for key in some)
