"""Running what a writer does on each partition of a DataFrame, with its messages as the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame

__all__ = ["messages_of"]

M = TypeVar("M")
_TYPES = {"int": "long", "str": "string"}


def messages_of(
    df: DataFrame, write: Callable[[Iterator[pa.RecordBatch]], Any], kind: type[M]
) -> list[M]:
    """Write every partition, and return the messages: dataclasses of a kind, of numbers and text."""

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist([asdict(write(batches))])

    names = [(field.name, _TYPES[str(field.type)]) for field in fields(kind)]  # type: ignore[arg-type]
    rows = df.mapInArrow(each, ", ".join(f"{name} {type_}" for name, type_ in names)).collect()
    return [kind(**row.asDict()) for row in rows]
