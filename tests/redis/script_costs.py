"""What the calls of the scripts may cost at most: commands and bytes."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """What one script call may cost at most, or what the most expensive call of a script has cost."""

    commands: int
    """number of Redis commands that the script executes"""
    bytes: int
    """number of bytes of its arguments and its answer"""
    milliseconds: float = 0.0


_MB = 1024 * 1024
BOUNDS: dict[str, Cost] = {
    "ack": Cost(9000, 5 * _MB),
    "adopt": Cost(2000, 5 * _MB),
    "after_close": Cost(20, 1000),
    "after_confirm": Cost(1000, 100_000),
    "after_lines": Cost(3000, 9 * _MB),
    "after_register": Cost(3000, 5 * _MB),
    "after_release": Cost(9000, 5 * _MB),
    "after_seal": Cost(20, 1000),
    "after_tally": Cost(60, 1000),
    "audit_entries": Cost(20, 3 * _MB),
    "audit_record": Cost(20, 10_000),
    "beat": Cost(20, 1000),
    "cancel": Cost(600, 1000),
    "configure": Cost(7000, 40_000),
    "dead_letter": Cost(40, 20_000),
    "dead_letters": Cost(1600, 5 * _MB),
    "delete": Cost(9000, 1000),
    "erase": Cost(9000, 1000),
    "health": Cost(20, 1000),
    "join": Cost(2100, 300_000),
    "leave": Cost(6000, 1000),
    "list": Cost(3000, 1 * _MB),
    "maintain": Cost(20_000, 300_000),
    "pending": Cost(600, 100_000),
    "progress": Cost(40, 10_000),
    "promises": Cost(1200, 300_000),
    "promote": Cost(9000, 1000),
    "publish": Cost(9000, 5 * _MB),
    "purge": Cost(9000, 1000),
    "queues": Cost(20, 300_000),
    "repair": Cost(20_000, 1000),
    "receive": Cost(6000, 9 * _MB),
    "redeliver": Cost(6000, 100_000),
    "redrive": Cost(9000, 10_000),
    "reschedule": Cost(40, 300_000),
    "result": Cost(600, 5 * _MB),
    "schedule_retry": Cost(60, 300_000),
    "schedule_delete": Cost(40, 1000),
    "schedule_due": Cost(3100, 5 * _MB),
    "schedule_fire": Cost(9000, 5 * _MB),
    "schedule_put": Cost(40, 300_000),
    "schedules": Cost(3100, 5 * _MB),
    "slots_acquire": Cost(6000, 200_000),
    "slots_assign": Cost(6000, 400_000),
    "slots_configure": Cost(20, 100_000),
    "slots_documents": Cost(20, 100_000),
    "slots_late": Cost(3000, 3 * _MB),
    "slots_leave": Cost(3000, 300_000),
    "slots_look": Cost(6000, 1 * _MB),
    "slots_reconcile": Cost(6000, 1 * _MB),
    "slots_register": Cost(40, 10_000),
    "slots_release": Cost(6000, 200_000),
    "slots_renew": Cost(6000, 400_000),
    "slots_restore": Cost(3000, 10_000),
    "slots_steer": Cost(40, 1000),
    "sort": Cost(9000, 1000),
    "stats": Cost(3000, 300_000),
    "stream_append": Cost(9000, 5 * _MB),
    "stream_read": Cost(3000, 9 * _MB),
    "status": Cost(1100, 5 * _MB),
    "task": Cost(100, 2 * _MB),
    "workers": Cost(3000, 300_000),
}
"""by script, the maximum number of commands and bytes of one call

A list of the slot pool (``slots_look``) is one view of the whole pool, so it grows with the number of endpoints and
leases; here there are 100 and 1,000.
"""
