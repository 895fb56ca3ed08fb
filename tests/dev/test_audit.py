"""Tests of `dev.py audit`: pip-audit itself is run, with an advisory service on this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = (*ROOT.glob("*.lock"), *ROOT.glob("tests/*/requirements.txt"), *ROOT.glob("deploy/*.lock"))
VULNERABLE = {"id": "PYSEC-0", "affected": [], "summary": "a vulnerability"}


class Service(ThreadingHTTPServer):
    """An advisory service like OSV, which knows one vulnerable package."""

    asked: set[tuple[str, str]]
    vulnerable = ""

    class Handler(BaseHTTPRequestHandler):
        """Answers queries."""

        server: Service

        def do_POST(self) -> None:
            """Answer whether a version of a package is vulnerable."""
            query = json.loads(self.rfile.read(int(self.headers["content-length"])))
            name, version = query["package"]["name"], query["version"]
            self.server.asked.add((name, version))
            found = {"vulns": [VULNERABLE]} if name == self.server.vulnerable else {}
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write no log."""


@pytest.fixture
def service() -> Iterator[Service]:
    """A running advisory service."""
    with Service(("127.0.0.1", 0), Service.Handler) as it:
        it.asked = set()
        thread = threading.Thread(target=it.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield it
        finally:
            it.shutdown()
            thread.join()


def audit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the audit."""
    return subprocess.run(
        [sys.executable, "-m", "tools.audit", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("vulnerable", ["", "hiredis"])
def test_every_locked_package_is_audited(service: Service, vulnerable: str) -> None:
    """U26 (A10): each version in each lock file is audited, on every platform; a vulnerable one fails."""
    service.vulnerable = vulnerable
    url = f"http://127.0.0.1:{service.server_port}"
    done = audit("--vulnerability-service", "osv", "--osv-url", url)
    assert (done.returncode, "PYSEC-0" in done.stdout) == (bool(vulnerable), bool(vulnerable))
    pins = {
        (name, version)
        for lock in LOCKS
        for name, version in re.findall(r"(?m)^([\w.-]+)==([^ ]+)", lock.read_text("utf-8"))
    }
    assert service.asked == pins


def test_what_cannot_be_audited_fails() -> None:
    """U26 (A10): if the advisory service cannot be reached, the audit fails."""
    done = audit(HTTPS_PROXY="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "Unable to connect to proxy" in done.stderr
    assert "No known vulnerabilities" not in done.stdout + done.stderr
