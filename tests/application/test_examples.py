"""Schedules, workflows, unique tasks and codecs together, in one registry, on each kind of store and on a cluster."""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography.fernet import Fernet as Cipher

from taskqueue_core import (
    CodecChain,
    Context,
    Cron,
    Debounce,
    Every,
    Fernet,
    Handle,
    Queue,
    Schedule,
    State,
    Tasks,
    Unique,
    Workflow,
    WorkflowState,
    Zlib,
)
from taskqueue_core.tasks import Published
from tests.application.flows import SECONDS, until
from tests.application.running import OpenWorld, also_on_a_cluster, working


class Shop:
    """A registry with a codec, and what its tasks have done."""

    def __init__(self) -> None:
        keys = [Cipher.generate_key().decode() for _ in range(2)]
        self.tasks = Tasks(prefix="shop.", codec=CodecChain(Zlib(above=64), Fernet(keys=keys)))
        self.ran: list[str] = []

        @self.tasks.task
        async def download(url: str) -> str:
            return url.rpartition("/")[2]

        @self.tasks.task
        async def resize(image: str, width: int) -> dict[str, int]:
            return {image: width}

        @self.tasks.task
        async def notify(text: str) -> None:
            self.ran.append(text)

        @self.tasks.task
        async def split(context: Context, image: str) -> None:
            first = context.workflow.add(resize.call(image, 64))
            context.workflow.add(notify.call("added"), after=first)

        @self.tasks.task(schedule=Cron("0 9 * * MON-FRI", timezone="Europe/Berlin"))
        async def report() -> None:
            self.ran.append("report")

        @self.tasks.task
        async def digest(tenant: str) -> None:
            self.ran.append(f"digest {tenant}")

        @self.tasks.task(unique=Unique(by=("user",)))
        async def rebuild(user: int, reason: str) -> str:  # noqa: ARG001 - it is in the key
            self.ran.append(f"rebuild {reason}")
            return reason

        self.download, self.resize, self.notify, self.split = download, resize, notify, split
        self.digest, self.rebuild = digest, rebuild
        self.tasks.schedule("digest.all", digest.call("all"), Every(3600))


async def _workflow(shop: Shop, queue: Queue) -> None:
    flow = Workflow()
    source = flow.add(shop.download.call("https://example.org/cat.png"))
    small = [flow.add(shop.resize.call(source.output, width), after=source) for width in (320, 640)]
    flow.add(shop.notify.call("done"), after=small)
    flow.add(shop.notify.call("failed"), after=small, when="failed")
    flow.add(shop.split.call(source.output), after=small)
    handle = await flow.publish(id="cat-17")
    assert await handle.result(small[1], SECONDS) == {"cat.png": 640}
    status = await handle.wait(SECONDS)
    assert status.state is WorkflowState.ENDED
    assert {step.name: step.state for step in status.steps} == {
        **dict.fromkeys(["download", "resize", "resize-2", "notify", "split"], State.DONE),
        "notify-2": State.CANCELLED,
        **dict.fromkeys(["split:resize", "split:notify"], State.DONE),
    }
    assert sorted(shop.ran) == ["added", "done"]
    page = await queue.workflows.list()
    assert [each.id for each in page.workflows] == ["cat-17"]


async def _schedules(shop: Shop, queue: Queue) -> None:
    await shop.tasks.apply()
    schedules = queue.schedules
    made = Schedule(
        name="digest.acme",
        when=Cron("0 7 * * *", timezone="Asia/Tokyo"),
        call=shop.digest.call("acme"),
        overlap="skip",
    )
    await schedules.put(made)
    found = [each.name for each in await schedules.list()]
    assert found == ["digest.acme", "shop.digest.all", "shop.report"]
    (first, *_) = await schedules.next("digest.acme", 3)
    assert datetime.fromtimestamp(first, UTC).hour == 22
    assert (await schedules.pause("digest.acme")).paused
    assert not (await schedules.resume("digest.acme")).paused
    before = len(shop.ran)
    for name in found:
        await schedules.trigger(name)

    async def all_ran() -> bool:
        return len(shop.ran) == before + 3

    await until(all_ran)
    assert sorted(shop.ran[before:]) == ["digest acme", "digest all", "report"]
    assert await schedules.delete("digest.acme")


async def _unique(shop: Shop) -> None:
    soon = shop.rebuild.using(debounce=Debounce(seconds=30, max_wait=300))
    first = await soon.publish(user=7, reason="edited")
    second = await soon.publish(user=7, reason="edited again")
    kept = await shop.rebuild.publish(user=7, reason="not kept")
    assert [_status(each) for each in (first, second, kept)] == [
        Published.ACCEPTED,
        Published.REPLACED,
        Published.DUPLICATE,
    ]
    assert {first.id, second.id, kept.id} == {first.id}
    await first.reschedule(delay=0)
    assert await kept.result(SECONDS) == "edited again"


def _status(handle: Handle[str]) -> Published | None:
    return None if handle.confirmation is None else handle.confirmation.status


@also_on_a_cluster
async def test_together(world: OpenWorld) -> None:
    """U12, U13, U15, U17: the calls of the pages do what they say, with encrypted payloads, on each kind of store."""
    shop = Shop()
    async with (
        world() as opened,
        shop.tasks.connect(Queue(opened.backend)) as queue,
        working(opened.worker(shop.tasks)),
    ):
        await _workflow(shop, queue)
        await _unique(shop)
        await _schedules(shop, queue)
