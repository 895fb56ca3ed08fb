"""The backend wrappers define every forwarded method explicitly, so that the type checker sees it."""

from __future__ import annotations

import inspect

import pytest

from taskqueue_core import capabilities
from taskqueue_core.backend import Backend, Publisher, Subscription
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.migration import MigratingBackend
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_memory import MemoryBackend

_OF_SUBSCRIPTIONS = {"DeadLettering", "Handover", "Revocation"}
_OF_PUBLISHERS = {"RoomSignals"}
_OF_ATTRIBUTES = {
    "Control": "control",
    "DeadLetters": "dead_letters",
    "Dependencies": "dependencies",
    "SlotPool": "slots",
    "Schedules": "schedules",
    "Audit": "audit",
    "Listing": "listing",
    "Streams": "streams",
}
_MADE_BY_METHODS = {"RoomSignal"}
_OF_REMOTE_BACKENDS = {"LongPolling"}


def _protocols() -> dict[str, type]:
    members = {name: getattr(capabilities, name) for name in capabilities.__all__}
    return {name: kind for name, kind in members.items() if getattr(kind, "_is_protocol", False)}


def _names(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]


def _is_own(wrapper: object, name: str) -> bool:
    """Return whether an object or its class defines an attribute, ignoring ``__getattr__``."""
    try:
        inspect.getattr_static(wrapper, name)
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("kind", ["instrumented", "sharded", "migrating", "all"])
async def test_each_method_is_an_attribute_of_the_wrappers(kind: str) -> None:
    """G6: the wrappers define all methods of the publisher, of the subscription and of every capability protocol."""
    backends: dict[str, Backend] = {
        "instrumented": InstrumentedBackend(MemoryBackend(), Hooks()),
        "sharded": ShardedBackend(MemoryBackend()),
        "migrating": MigratingBackend(MemoryBackend(), MemoryBackend()),
        "all": InstrumentedBackend(
            MigratingBackend(ShardedBackend(MemoryBackend()), ShardedBackend(MemoryBackend())),
            Hooks(),
        ),
    }
    backend = backends[kind]
    subscription = backend.subscribe(["k"], "w")
    protocols = _protocols()
    for name, protocol in protocols.items():
        if name in _MADE_BY_METHODS | _OF_REMOTE_BACKENDS:
            continue
        if name in _OF_SUBSCRIPTIONS:
            owner: object = subscription
        elif name in _OF_PUBLISHERS:
            owner = backend.publisher
        elif name in _OF_ATTRIBUTES:
            assert _is_own(backend, _OF_ATTRIBUTES[name])
            owner = getattr(backend, _OF_ATTRIBUTES[name])
        else:
            owner = backend  # protocols such as HasControl have their member on the backend
        missing = [method for method in _names(protocol) if not _is_own(owner, method)]
        assert missing == [], f"{name} of {type(owner).__name__}"
    for contract, owner in ((Publisher, backend.publisher), (Subscription, subscription)):
        assert all(_is_own(owner, name) for name in _names(contract))
    assert {*_OF_SUBSCRIPTIONS, *_OF_PUBLISHERS, *_OF_ATTRIBUTES, *_MADE_BY_METHODS} <= {*protocols}
    await subscription.close()
    await backend.aclose()


def test_no_wrapper_forwards_by_name() -> None:
    """G6: no wrapper has a ``__getattr__`` that forwards arbitrary attributes."""
    for wrapper in (InstrumentedBackend, ShardedBackend, MigratingBackend):
        assert not hasattr(wrapper, "__getattr__")
