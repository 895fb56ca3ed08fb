"""The AsyncAPI 3.1 document of the workers' socket, made from the frames themselves."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, get_args

import msgspec

from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol import frames
from taskqueue_server.context.connections import MAX_CONNECTIONS, MAX_STRANGERS
from taskqueue_server.routing.schemas import NAME
from taskqueue_server.worker_socket.admission import HELLO_SECONDS

_ABOUT = """How a worker in any language receives tasks and settles them.

Request the subprotocol `taskqueue.v1`. Send `hello` first and wait for the `welcome`; grant credit, and settle each
delivery after executing its task. Answer pings. Messages are text, each one JSON object in UTF-8; nothing is
compressed. Integers are written without a fraction: `1`, not `1.0`.
Ignore unknown fields and frames: either side may be newer. Deliveries are at least once: keep an outcome until
`settled` confirms it, and send it again after a reconnect. See `docs/protocol.md` for details."""

CLOSE_CODES = {
    frames.CLOSE_CLEAN: "after the worker's bye",
    1007: "text that is not UTF-8: a bug in the worker",
    1009: "a message larger than the frame limit: a bug in the worker",
    1011: "the server failed: reconnect after a pause",
    frames.CLOSE_RESTART: "the server is shutting down: reconnect to any replica",
    frames.CLOSE_TRY_LATER: "too many connections, or the store is unavailable: reconnect after a pause",
    frames.CLOSE_REVOKED: "the token is revoked or expired, or no longer permits a key: reconnect with a valid token",
    frames.CLOSE_PROTOCOL: "a protocol violation, which the preceding error frame names: a bug in the worker",
    frames.CLOSE_UNAUTHENTICATED: "the token is missing, wrong, or may not consume: do not reconnect",
    frames.CLOSE_TIMEOUT: "no hello in time, or silence for longer than the lease: reconnect",
}
"""close codes that the server sends: the meaning of each, and in most cases what the worker should do"""

_EXAMPLES: dict[str, dict[str, Any]] = {
    "hello": {"worker_id": "gpu-7.4211", "keys": ["resize"], "credit": 2},
    "credit": {"n": 1},
    "ack": {"receipts": ["kq3vXw.17"], "results": {"kq3vXw.17": {"width": 640}}},
    "redeliver": {"receipts": ["kq3vXw.19"]},
    "retry": {"receipt": "kq3vXw.20", "error": "ConnectionError: timed out", "delay": 30},
    "dead_letter": {"receipt": "kq3vXw.21", "reason": "bad_input"},
    "progress": {"receipt": "kq3vXw.22", "value": 0.4},
    "event": {
        "streams": [
            {
                "receipt": "kq3vXw.22",
                "first": 1,
                "events": [{"value": "Once"}, {"value": {"step": 2}, "channel": "log"}],
            }
        ]
    },
    "bye": {},
    "welcome": {
        "connection_id": "9f2c41d07ab35e68",
        "lease": 15.0,
        "server": "0.1.0",
        "limits": msgspec.to_builtins(frames.WireLimits()),
        "adopted": ["kq3vXw.17"],
    },
    "deliver": {
        "deliveries": [
            {
                "receipt": "kq3vXw.17",
                "attempt": 1,
                "delivered_at": 1767225600.25,
                "task": {"id": "a1", "key": "resize", "payload": {"url": "s3://in/1.png"}},
            }
        ]
    },
    "settled": {"ok": ["kq3vXw.17"], "lease_lost": ["kq3vXw.16"]},
    "stored": {"numbers": {"kq3vXw.22": 2}},
    "revoke": {"receipts": ["kq3vXw.18"]},
    "drain": {"seconds": 5.0},
    "degraded": {"reason": "backend_unavailable"},
    "error": {"code": "invalid_frame", "message": "Object missing required field `receipts`"},
    "ping": {"n": 7},
    "pong": {"n": 7},
}
_REF = "#/components/schemas/{name}"


@cache
def document(version: str) -> dict[str, Any]:
    """Return the AsyncAPI document from the server's point of view: it receives the frames that workers send."""
    of_workers = _by_tag(frames.ClientFrame)
    of_server = _by_tag(frames.ServerFrame)
    both = of_workers | of_server
    return {
        "asyncapi": "3.1.0",
        "info": {
            "title": "taskqueue workers",
            "version": version,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "this": {
                "host": "{host}",
                "protocol": "ws",
                "description": "wss if the server has a certificate",
                "variables": {"host": {"default": "127.0.0.1:8420"}},
            }
        },
        "channels": {"socket": _channel(both)},
        "operations": {
            **{
                f"receive_{tag}": _operation("receive", tag, kind)
                for tag, kind in of_workers.items()
            },
            **{f"send_{tag}": _operation("send", tag, kind) for tag, kind in of_server.items()},
        },
        "components": {
            "messages": {tag: _message(tag, kind) for tag, kind in both.items()},
            "schemas": _schemas(both),
        },
    }


def _by_tag(union: Any) -> dict[str, type[msgspec.Struct]]:
    return {str(kind.__struct_config__.tag): kind for kind in get_args(union)}


def _channel(both: dict[str, type[msgspec.Struct]]) -> dict[str, Any]:
    subprotocol = {"type": "string", "const": frames.SUBPROTOCOL}
    return {
        "address": "/v1/socket",
        "title": "The workers' socket",
        "messages": {tag: {"$ref": f"#/components/messages/{tag}"} for tag in both},
        "bindings": {
            "ws": {
                "method": "GET",
                "headers": {
                    "type": "object",
                    "properties": {"Sec-WebSocket-Protocol": subprotocol},
                    "required": ["Sec-WebSocket-Protocol"],
                },
                "bindingVersion": "0.1.0",
            }
        },
        "x-close-codes": {str(code): meaning for code, meaning in sorted(CLOSE_CODES.items())},
        "x-limits": {
            "frame-bytes": LIMITS.frame,
            "payload-bytes": LIMITS.payload,
            "result-bytes": LIMITS.result,
            "json-depth": LIMITS.depth,
            "held-and-credit": LIMITS.credit,
            "hello-seconds": HELLO_SECONDS,
            "sockets-without-hello": MAX_STRANGERS,
            "sockets": MAX_CONNECTIONS,
        },
    }


def _operation(action: str, tag: str, kind: type) -> dict[str, Any]:
    described: dict[str, Any] = {
        "action": action,
        "channel": {"$ref": "#/channels/socket"},
        "summary": _summary(kind),
        "messages": [{"$ref": f"#/channels/socket/messages/{tag}"}],
    }
    answers = {
        "receive_hello": "welcome",
        "receive_ping": "pong",
        "send_ping": "pong",
        **{f"receive_{tag}": "settled" for tag in _SETTLEMENTS},
    }
    if answer := answers.get(f"{action}_{tag}"):
        described["reply"] = {
            "channel": {"$ref": "#/channels/socket"},
            "messages": [{"$ref": f"#/channels/socket/messages/{answer}"}],
        }
    return described


_SETTLEMENTS = ("ack", "redeliver", "retry", "dead_letter")


def _message(tag: str, kind: type) -> dict[str, Any]:
    return {
        "name": tag,
        "title": _title(tag),
        "summary": _summary(kind),
        "contentType": "application/json",
        "payload": {"$ref": _REF.format(name=_title(tag))},
        "examples": [{"payload": {"type": tag, **_EXAMPLES[tag]}}],
    }


def _title(tag: str) -> str:
    return "".join(word.capitalize() for word in tag.split("_"))


def _summary(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("``", "`").replace("\n", " ")


def _schemas(both: dict[str, type[msgspec.Struct]]) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(both.values(), ref_template=_REF)
    for tag, kind in both.items():  # renaming is safe: no schema refers to another
        schemas[_title(tag)] = {**schemas.pop(kind.__name__), "title": _title(tag)}
    for schema in schemas.values():
        if "description" in schema:
            schema["description"] = schema["description"].replace("``", "`")
    hello = schemas["Hello"]["properties"]
    # The server's session checks these fields more strictly than their types say.
    hello["worker_id"] |= NAME
    hello["keys"]["items"] |= NAME
    hello["protocol"] = {"const": frames.PROTOCOL_VERSION, "default": frames.PROTOCOL_VERSION}
    return schemas
