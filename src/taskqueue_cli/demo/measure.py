"""The work of the demonstration, for workers and for whoever checks them."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

__all__ = ["Measured", "measure"]

Measured = dict[str, str | int]
_CHUNK = 256 * 1024


def measure(path: str) -> Measured:
    """Return a file's digest, bytes, lines and compressed size; of one that cannot be read, the kind of error.

    Memory does not grow with the file.
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
