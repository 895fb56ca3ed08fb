"""Digests of contents over HTTP."""

from __future__ import annotations

import base64

import httpx2


async def test_digests_of_contents(api: httpx2.AsyncClient) -> None:
    """Law 7: with a digest of the content, another payload is a duplicate; a wrong digest names the field."""
    digest = base64.b64encode(b"d" * 32).decode()
    body = {"key": "k", "id": "t1", "content_digest": digest}
    statuses = [
        (await api.post("/v1/tasks", json=body | more)).json()["status"]
        for more in (
            {"payload": "one"},
            {"payload": "two"},
            {"payload": "one", "content_digest": base64.b64encode(b"e" * 32).decode()},
            {"payload": "one", "content_digest": None},
        )
    ]
    assert statuses == ["accepted", "duplicate", "conflict", "conflict"]
    for wrong in ("AAAA", "%", 5, base64.b64encode(bytes(65)).decode()):
        answer = await api.post("/v1/tasks", json=body | {"content_digest": wrong})
        assert answer.status_code == 422
        assert "content_digest" in answer.text
