"""The audit log: entries newest first, page by page, shared by all processes, and bounded."""

from __future__ import annotations

from taskqueue_conformance.bench import Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import AuditEntry, audit_of

_FULL = AuditEntry(
    actor="ops",
    action="redrive",
    key="mail",
    tasks=17,
    details="error=Timeout \u2028 gr\u00fc\u00dfe",
)


class AuditSuite(Harness, needs=(Capability.AUDIT,)):
    """Tests of `taskqueue_core.capabilities.Audit`."""

    async def test_entries(self, bench: Bench) -> None:
        """U21: an entry is returned as it was recorded, with an id and the time of the store; newest first."""
        audit = audit_of(bench.backend)
        assert await audit.entries() == ()
        before = bench.now
        await audit.record(_FULL)
        await audit.record(AuditEntry(actor="ops", action="maintain"))
        second, first = await audit.entries()
        assert (first.actor, first.action, first.key, first.tasks, first.details) == (
            _FULL.actor,
            _FULL.action,
            _FULL.key,
            _FULL.tasks,
            _FULL.details,
        )
        assert (second.action, second.key, second.tasks, second.details) == (
            "maintain",
            None,
            None,
            "",
        )
        assert first.id != second.id
        assert before - 1 <= first.at <= second.at <= bench.now + 1

    async def test_pages_of_entries(self, bench: Bench) -> None:
        """U21: the pages have each entry once, although entries are added between them."""
        audit = audit_of(bench.backend)
        for number in range(25):
            await audit.record(AuditEntry(actor="ops", action="purge", tasks=number))
        seen: list[int | None] = []
        after = None
        while page := await audit.entries(after=after, limit=4):
            assert len(page) <= 4
            seen += [entry.tasks for entry in page]
            after = page[-1].id
            await audit.record(AuditEntry(actor="ops", action="purge", tasks=1000))
        assert seen == [*reversed(range(25))]
        for wrong in ("", "x", "1-2-3", "9" * 30):
            await bench.invalid("after", audit.entries(after=wrong))
        for limit in (0, 1001):
            await bench.invalid("limit", audit.entries(limit=limit))

    async def test_long_texts_are_cut(self, bench: Bench) -> None:
        """U21: long texts are cut, so that an entry is small."""
        audit = audit_of(bench.backend)
        await audit.record(AuditEntry(actor="a" * 999, action="purge", details="d" * 9999))
        (entry,) = await audit.entries()
        assert (len(entry.actor), len(entry.details)) == (200, 500)

    @needs("shared")
    async def test_entries_of_another_process(self, bench: Bench) -> None:
        """U21: entries are visible to all processes of the store."""
        other = await bench.replica()
        await audit_of(bench.backend).record(_FULL)
        (entry,) = await audit_of(other.backend).entries()
        assert entry.details == _FULL.details
