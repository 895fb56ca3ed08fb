"""The task handler of the demo, and its computation, which the check of the results repeats."""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path

from taskqueue_worker import Context, Worker

Measured = dict[str, str | int]
_CHUNK = 256 * 1024


def measure(path: str) -> Measured:
    """Return the digest and the sizes of a file, or the type of the error if the file cannot be read.

    The file is read in chunks, so that memory use does not depend on its size.
    """
    digest, packer = hashlib.sha256(), zlib.compressobj()
    size = lines = packed = 0
    last = b"\n"
    try:
        with Path(path).open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                packed += len(packer.compress(chunk))
                size += len(chunk)
                lines += chunk.count(b"\n")
                last = chunk[-1:]
    except OSError as error:
        return {"error": type(error).__name__}
    packed += len(packer.flush())
    lines += last != b"\n"
    return {"sha256": digest.hexdigest(), "bytes": size, "lines": lines, "compressed": packed}


KEY_VARIABLE = "TASKQUEUE_DEMO_KEY"
KEY = os.environ.get(KEY_VARIABLE, "digest")
"""name of the queue, different for each run, because a shared store may still contain tasks of earlier runs"""

worker = Worker(concurrency=4, prefetch=8, grace=2.0)


@worker.task(KEY)
def digest(
    path: str, context: Context, *, fails_first: bool = False, poison: bool = False
) -> Measured:
    """Measure one file. Fail on purpose if ``poison`` is set, or if ``fails_first`` is set and this is attempt 1."""
    if poison:
        raise RuntimeError("poison: this task can never succeed")
    if fails_first and context.attempt == 1:
        raise ConnectionError("deliberate failure of the first attempt")
    return measure(path)
