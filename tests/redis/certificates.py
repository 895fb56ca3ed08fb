"""Certificates for a server on this machine, made anew for a test run."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

__all__ = ["Certificates", "make_certificates"]


class Certificates(NamedTuple):
    """Files in PEM."""

    authority: Path
    """who signed; what a client trusts"""
    certificate: Path
    """for 127.0.0.1, ::1 and localhost"""
    key: Path

    def context(self) -> ssl.SSLContext:
        """Return what a client needs that trusts this authority and no other."""
        return ssl.create_default_context(cafile=str(self.authority))


def make_certificates(folder: Path) -> Certificates:
    """Make an authority and a certificate that it signed, valid for a day. Needs the ``openssl`` command."""
    folder.mkdir(parents=True, exist_ok=True)
    names = "subjectAltName=IP:127.0.0.1,IP:::1,DNS:localhost"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "1"]
    authority = ["-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=taskqueue tests"]
    _openssl(folder, "req", "-x509", *curve, *authority, "-addext", "keyUsage=keyCertSign")
    server = ["-keyout", "server.key", "-out", "server.crt", "-subj", "/CN=localhost"]
    signer = ["-CA", "ca.crt", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE"]
    _openssl(folder, "req", "-x509", *curve, *server, *signer, "-addext", names)
    return Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)
