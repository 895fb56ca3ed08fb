"""Operations of the HTTP API: their definition, and how a request is routed, authorized and answered."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from taskqueue_core.capabilities import AuditEntry
from taskqueue_core.errors import InvalidInput
from taskqueue_core.hooks import Identity
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_server.auth.access import OPEN
from taskqueue_server.auth.credentials import (
    by_cookie,
    mark_authenticated,
    peer_of,
    session_of,
    token_of,
)
from taskqueue_server.auth.origins import is_own_origin
from taskqueue_server.auth.tickets import expiring
from taskqueue_server.context.audit import record_action
from taskqueue_server.context.server import ServerContext
from taskqueue_server.context.unauthenticated import BODY_BYTES, SECONDS
from taskqueue_server.problems import ProblemError, problem_of, respond
from taskqueue_server.routing import bodies

T = TypeVar("T")
_CHUNK = 256 * 1024
_NUMBER = re.compile(r"[0-9]{1,9}")
_SAFE = frozenset({"GET", "HEAD"})
_REAL = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?")
_STRICT = "/v1/"
"""prefix of the paths for which unknown query parameters are refused, so that a misspelled filter is not ignored"""
_encoder = msgspec.json.Encoder()


class RequestContext:
    """One HTTP request: its client, its parameters and body, and the state of the server."""

    def __init__(self, request: Request, verbs: Sequence[str] = ()) -> None:
        self.request = request
        self.context: ServerContext = request.app.state.context
        self.verbs = verbs
        self.identity: Identity | None = None
        """the client; `OPEN` on a server without authentication, and ``None`` if the operation requires no token"""
        self.trusted = False
        """whether `trust` was called"""
        self.expires: float | None = None
        """time, in Unix seconds, at which the ticket expires that the client has shown in place of a token"""
        self.noted: AuditEntry | None = None
        """the action that was noted, see `note`"""

    @property
    def client_name(self) -> str | None:
        """The name of the client's token, or ``None`` if the client is not authenticated."""
        return self.identity.name if self.context.access.authenticates and self.identity else None

    @property
    def operates(self) -> bool:
        """Whether the client is an operator: its token has the right ``admin``."""
        return self.identity is not None and "admin" in self.identity.verbs

    async def begin(self, action: str, key: str, *, details: str = "") -> None:
        """Add the beginning of an action to the audit log now, so that it is there even if this process is killed."""
        entry = self.note(f"begin to {action}", key, details=details)
        self.noted = None
        await record_action(self.context.backend, entry)

    def note(
        self, action: str, key: str | None = None, *, tasks: int | None = None, details: str = ""
    ) -> AuditEntry:
        """Note what the client has done. It is added to the audit log before the response is sent.

        ``tasks`` is the number of tasks that were changed.
        """
        actor = (self.identity or OPEN).name
        entry = AuditEntry(actor=actor, action=action, key=key, tasks=tasks, details=details)
        self.noted = entry
        return entry

    def trust(self) -> None:
        """Lift the limits of an unauthenticated client that has shown a credential which the handler has checked."""
        self.trusted = True
        mark_authenticated(self.request.scope)

    def accept_ticket(self, ticket: str) -> None:
        """Permit the operation on the task that the path names. Raises `ProblemError` unless the ticket is for it."""
        key, task_id, now = self.name("key"), self.name("id"), self.context.backend.now()
        self.expires = self.context.tickets.expiry(ticket, key, task_id, now)
        self.trust()

    def is_allowed(self, key: str, verbs: Sequence[str] | None = None) -> bool:
        """Return whether the client may execute this operation on the queue ``key``, or one with other ``verbs``."""
        identity, verbs = self.identity, self.verbs if verbs is None else verbs
        for verb in verbs:
            if identity is not None and identity.is_allowed(verb, key):
                return True
        return not verbs

    def demand(self, key: str, verbs: Sequence[str] | None = None, name: str = "this key") -> None:
        """Raise `ProblemError` unless `is_allowed`. ``name`` says in the error which queue it is."""
        if not self.is_allowed(key, verbs):
            needed = _either(self.verbs if verbs is None else verbs)
            raise _forbidden(f"this token lacks the required right ({needed}) for {name}")

    def watch_access(self) -> AbstractContextManager[asyncio.Event]:
        """Watch the token, or the ticket, during the block. The yielded event is set once its rights change or end."""
        if self.expires is not None:
            return expiring(self.expires - self.context.backend.now())
        identity = self.identity
        request = self.request
        return self.context.access.watch_access(
            token_of(request),
            peer_of(request),
            lambda now: (
                identity is None or (identity.verbs, identity.keys) == (now.verbs, now.keys)
            ),
            session_of(request),
        )

    def name(self, part: str) -> str:
        """Return the path parameter ``part``. Raises `InvalidInput` unless it is a valid name."""
        value: str = self.request.path_params[part]
        check_name(part, value)
        return value

    def number(self, name: str, default: int | None, highest: int, *, lowest: int = 1) -> int:
        """Return an integer query parameter, which is required if there is no ``default``. Raises `InvalidInput`."""
        text = self.request.query_params.get(name)
        if text is None and default is not None:
            return default
        if text is not None and _NUMBER.fullmatch(text) and lowest <= int(text) <= highest:
            return int(text)
        raise InvalidInput(name, _got(text), f"a whole number from {lowest} to {highest}")

    def flag(self, name: str) -> bool:
        """Return a flag from the query, ``true`` or ``false`` (the default). Raises `InvalidInput`."""
        text = self.request.query_params.get(name)
        if text in {None, "true", "false"}:
            return text == "true"
        raise InvalidInput(name, _got(text), "true or false")

    def query_name(self, name: str) -> str | None:
        """Return a valid name from the query, or ``None`` if it is absent. Raises `InvalidInput`."""
        text = self.request.query_params.get(name)
        if text is not None:
            check_name(name, text)
        return text

    def real(self, name: str, highest: float) -> float | None:
        """Return a non-negative number from the query, or ``None`` if it is absent. Raises `InvalidInput`."""
        text = self.request.query_params.get(name)
        if text is None:
            return None
        if _REAL.fullmatch(text) and float(text) <= highest:
            return float(text)
        raise InvalidInput(name, _got(text), f"a number from 0 to {highest:.0f}")

    def text(self, name: str) -> str | None:
        """Return text from the query, or ``None`` if it is absent. Raises `InvalidInput`."""
        text = self.request.query_params.get(name)
        if text is None or 0 < len(text) <= LIMITS.text:
            return text
        raise InvalidInput(name, _got(text), f"text of 1 to {LIMITS.text} characters")

    def confirm(self, expected: str) -> None:
        """Raise `InvalidInput` unless the query confirms an irreversible action with ``confirm=expected``."""
        if (text := self.request.query_params.get("confirm")) != expected:
            raise InvalidInput("confirm", _got(text), f"confirm={expected}")

    async def stream(
        self, kind: str, limit: int = LIMITS.body, name: str = "body"
    ) -> AsyncIterator[bytes]:
        """Yield the body in chunks. Raises `ProblemError` as `bodies.stream` does, or if the client's rights change."""
        anonymous = self.identity is None or not self.context.access.authenticates
        seconds = bodies.BODY_SECONDS
        if self.identity is None and not self.trusted and self.context.access.authenticates:
            limit, name = min((limit, name), (BODY_BYTES, "unauthenticated"))
            seconds = SECONDS
        with nullcontext(asyncio.Event()) if anonymous else self.watch_access() as dismissed:
            async for chunk in bodies.stream(self.request, kind, limit, seconds, name):
                if dismissed.is_set():
                    raise unauthenticated()
                yield chunk
            if dismissed.is_set():
                raise unauthenticated()

    async def read(
        self, kind: str = bodies.JSON, limit: int = LIMITS.body, name: str = "body"
    ) -> bytes:
        """Return the whole body, which may have at most ``limit`` bytes. Raises `ProblemError`."""
        return b"".join([chunk async for chunk in self.stream(kind, limit, name)])

    async def body(self, kind: type[T], limit: int = LIMITS.body, name: str = "body") -> T:
        """Return the decoded JSON body. Raises `ProblemError`."""
        return bodies.decode(kind, await self.read(limit=limit, name=name))


def _got(text: str | None) -> str:
    return "nothing" if text is None else f"text of length {len(text)}"


Handler = Callable[[RequestContext], Awaitable[Response]]


class Query(msgspec.Struct, frozen=True):
    """A query parameter or a header of an operation."""

    name: str
    schema: dict[str, Any]
    description: str
    required: bool = False
    example: Any = None


class Scope(StrEnum):
    """The queues for which a client needs the right to execute an operation."""

    PATH = "path"
    """the queue that the path names, checked before the handler runs"""
    HANDLER = "handler"
    """queues that the handler itself checks with `RequestContext.demand` or filters with `RequestContext.is_allowed`"""
    SERVER = "server"
    """all queues"""


class Operation(msgspec.Struct, frozen=True):
    """One method of a path in the HTTP API or the dashboard. The docstring of its handler is its description."""

    method: str
    path: str
    handler: Handler
    answers: dict[int, Any]
    """type of the response body for each status: a tuple means one of several types, ``None`` an undocumented type"""
    id: str = ""
    """``operationId`` in the OpenAPI document; required if the operation is documented"""
    verb: str | tuple[str, ...] | None = None
    """the required right, or several rights of which one is enough; ``None`` if no token is required"""
    scope: Scope = Scope.PATH
    body: Any = None
    media_type: str = bodies.JSON
    query: tuple[Query, ...] = ()
    headers: tuple[Query, ...] = ()
    """request headers that the handler reads"""
    problems: tuple[int, ...] = ()
    tag: str = "server"
    """section of the API documentation"""
    example: Any = None
    """example of the request body"""
    response_headers: tuple[str, ...] = ()
    """additional headers of a successful response"""
    strict: bool | None = None
    """whether unknown query parameters are refused; by default only below ``/v1/``"""
    ticket: bool = False
    """whether a ticket for the task in the path, in the query, may take the place of a token"""

    @property
    def verbs(self) -> tuple[str, ...]:
        """The rights of which one is required; empty if no token is required."""
        return (self.verb,) if isinstance(self.verb, str) else self.verb or ()

    @property
    def address(self) -> str:
        """The path as documented, without the converter of a parameter that may contain slashes."""
        return self.path.replace(":path}", "}")


def routes(operations: Sequence[Operation]) -> list[Route]:
    """Return one route per path, so that a wrong method is answered with 405 and the allowed methods."""
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in operations:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    return [
        Route(path, _endpoint(methods), methods=list(methods)) for path, methods in by_path.items()
    ]


def _endpoint(methods: dict[str, Operation]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        operation = methods["GET" if request.method == "HEAD" else request.method]
        request.scope["taskqueue.operation"] = operation
        try:
            call = RequestContext(request, operation.verbs)
            if operation.verb:
                await _authorize(call, operation)
            if request.scope["query_string"]:
                _check_query(request, operation)
            response = await operation.handler(call)
        except Exception as error:  # noqa: BLE001 - every error becomes a problem document
            return respond(problem_of(error))
        if call.noted is not None:
            await record_action(call.context.backend, call.noted)
        return response

    return endpoint


async def _authorize(call: RequestContext, operation: Operation) -> None:
    request, access, verbs = call.request, call.context.access, call.verbs
    ticket = request.query_params.get("ticket") if operation.ticket else None
    if ticket is not None:
        call.accept_ticket(ticket)
        return
    identity: Identity | None = OPEN
    if access.authenticates:
        if request.method not in _SAFE and by_cookie(request):
            require_own_page(call)
        await access.open_session(request)
        identity = access.authenticate(request)
    if identity is None:
        raise unauthenticated()
    call.identity = identity
    request.scope["taskqueue.identity"] = identity.name
    if identity.rate is not None:
        call.context.usage.spend(identity)
    if identity.verbs.isdisjoint(verbs):
        raise _forbidden(f"this token lacks the required right: {_either(verbs)}")
    if operation.scope is Scope.SERVER and not any(map(identity.is_allowed, verbs)):
        raise _forbidden(f"this token has the required right ({_either(verbs)}) for some keys only")
    if operation.scope is Scope.PATH:
        call.demand(call.name("key"))


def _check_query(request: Request, operation: Operation) -> None:
    strict = operation.strict
    if strict is None:
        strict = operation.path.startswith(_STRICT)
    if not strict:
        return
    names = [name for name, _ in request.query_params.multi_items()]
    known = {query.name for query in operation.query}
    if not known.issuperset(names):
        allowed = ", ".join(sorted(known)) or "none"
        raise InvalidInput("query", "an unknown parameter", allowed)
    if len(names) != len(set(names)):
        raise InvalidInput("query", "a repeated parameter", "each parameter once")


def unauthenticated() -> ProblemError:
    """Return the problem for a client without a valid token."""
    challenge = {"www-authenticate": "Bearer"}
    return ProblemError(401, "unauthenticated", "a valid token is required", headers=challenge)


def require_own_page(call: RequestContext) -> None:
    """Raise `ProblemError` unless the request comes from a page of this server.

    A browser may add the session cookie to a request that a page of another site causes. If the request is unsafe, such
    as a POST, its ``Origin`` header names the page's site.
    """
    request, settings = call.request, call.context.settings
    if not is_own_origin(request.headers, request.url.scheme, settings.origins):
        detail = "cross-site request rejected: only pages of this server may send it"
        raise ProblemError(403, "origin", detail)


def _either(verbs: Sequence[str]) -> str:
    return " or ".join(verbs)


def _forbidden(detail: str) -> ProblemError:
    return ProblemError(403, "forbidden", detail)


def answer(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return the value as a JSON response."""
    return Response(_encoder.encode(value), status, headers, media_type=bodies.JSON)


def joined(head: bytes, items: Iterable[bytes], tail: bytes) -> Iterator[bytes]:
    """Yield the pieces of a JSON array or object: ``head``, the encoded items separated by commas, and ``tail``."""
    yield head
    for number, item in enumerate(items):
        yield b"," + item if number else item
    yield tail


def spliced(pieces: Iterator[bytes], media_type: str = bodies.JSON) -> Response:
    """Return a response with the joined pieces. The response is sent in chunks, because it may be large."""

    async def chunks() -> AsyncIterator[bytes]:
        chunk = bytearray()
        for piece in pieces:
            chunk += piece
            if len(chunk) >= _CHUNK:
                yield bytes(chunk)
                chunk.clear()
        yield bytes(chunk)

    return StreamingResponse(chunks(), media_type=media_type)
