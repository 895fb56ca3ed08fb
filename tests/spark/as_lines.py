"""Transitions as JSON lines, in the format of the memory backend's journal."""

from __future__ import annotations

import msgspec
import pyarrow as pa


def lines_of(table: pa.Table) -> list[bytes]:
    """Return one JSON line per row, without the shard and with an empty ``due_at``."""
    rows = table.drop_columns(["shard", "ts", "due_at"]).to_pylist()
    times = table["ts"].cast(pa.int64()).to_pylist()
    return [
        msgspec.json.encode({"v": 2, **row, "ts": time / 1e6, "due_at": None}) + b"\n"
        for row, time in zip(rows, times, strict=True)
    ]
