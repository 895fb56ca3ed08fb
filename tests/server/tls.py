"""Create valid and invalid TLS certificates for local test servers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

_NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost"
_PAST = f"""
[ca]
default_ca = one
[one]
database = issued
new_certs_dir = .
serial = serial
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = extensions
[any]
commonName = supplied
[extensions]
basicConstraints = CA:FALSE
authorityKeyIdentifier = keyid
{_NAMES}
"""


class Files(NamedTuple):
    """Paths of PEM files; all certificates use the same key."""

    authority: Path
    good: Path
    self_signed: Path
    expired: Path
    other_host: Path
    key: Path
    other_key: Path
    locked: Path
    """the same key as ``key``, encrypted with a password"""


def make_files(folder: Path) -> Files:
    """Create the certificate files. The ``openssl`` command is required."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    for key in ("ca", "key", "other"):
        openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key)
    openssl("pkey", "-in", "key", "-aes128", "-passout", "pass:x", "-out", "locked")
    usage = ["-addext", "keyUsage=keyCertSign"]
    openssl("req", "-x509", "-key", "ca", "-out", "ca.crt", "-subj", "/CN=tests", *usage)
    signed = ["-CA", "ca.crt", "-CAkey", "ca", "-addext", "basicConstraints=CA:FALSE"]

    def certificate(name: str, names: str, *words: str) -> None:
        basic = ["-key", "key", "-out", f"{name}.crt", "-subj", "/CN=localhost", "-addext", names]
        openssl("req", "-x509", *basic, *words)

    certificate("good", _NAMES, *signed)
    certificate("other_host", "subjectAltName=DNS:elsewhere.example", *signed)
    certificate("self_signed", _NAMES)
    # In all openssl versions, only the ``ca`` command can create an expired certificate.
    openssl("req", "-new", "-key", "key", "-out", "request", "-subj", "/CN=localhost")
    (folder / "issued").touch()
    (folder / "past.conf").write_text(_PAST, encoding="ascii")
    signer = ["-cert", "ca.crt", "-keyfile", "ca", "-config", "past.conf", "-batch", "-notext"]
    then = ["-startdate", "20200101000000Z", "-enddate", "20200201000000Z"]
    openssl("ca", *signer, *then, "-in", "request", "-out", "expired.crt")
    return Files(
        folder / "ca.crt",
        folder / "good.crt",
        folder / "self_signed.crt",
        folder / "expired.crt",
        folder / "other_host.crt",
        folder / "key",
        folder / "other",
        folder / "locked",
    )
