"""Typed access to the capabilities of a backend, with a clear error if a capability is missing."""

from __future__ import annotations

from typing import Protocol, cast

from taskqueue_core.backend import Backend, Capability, Subscription
from taskqueue_core.capabilities.audit import Audit
from taskqueue_core.capabilities.control import Control
from taskqueue_core.capabilities.dead_letters import DeadLetters
from taskqueue_core.capabilities.dependencies import Dependencies
from taskqueue_core.capabilities.listing import Listing
from taskqueue_core.capabilities.schedules import Schedules
from taskqueue_core.capabilities.slots import SlotPool
from taskqueue_core.capabilities.streams import Streams
from taskqueue_core.capabilities.subscriptions import DeadLettering, Handover, Revocation
from taskqueue_core.errors import CapabilityMissing


class HasControl(Protocol):
    """A backend with the capability ``control``."""

    @property
    def control(self) -> Control:
        """The methods that operators need."""


class HasDeadLetters(Protocol):
    """A backend with the capability ``dead_letters``."""

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters of all queues."""


class HasDependencies(Protocol):
    """A backend with the capability ``after``."""

    @property
    def dependencies(self) -> Dependencies:
        """The methods that carry lines between partitions."""


class HasListing(Protocol):
    """A backend with the capability ``listing``."""

    @property
    def listing(self) -> Listing:
        """The lists of tasks."""


class HasSlots(Protocol):
    """A backend with the capability ``slots``."""

    @property
    def slots(self) -> SlotPool:
        """The pool of slots."""


class HasSchedules(Protocol):
    """A backend with the capability ``schedules``."""

    @property
    def schedules(self) -> Schedules:
        """The schedules of all queues."""


class HasAudit(Protocol):
    """A backend with the capability ``audit``."""

    @property
    def audit(self) -> Audit:
        """The log of operators' actions."""


class HasStreams(Protocol):
    """A backend with the capability ``streams``."""

    @property
    def streams(self) -> Streams:
        """The events of all tasks."""


def has(backend: Backend, capability: Capability) -> bool:
    """Return whether the backend declares the capability."""
    return capability in backend.capabilities.names


def _require(backend: Backend, capability: Capability) -> None:
    if not has(backend, capability):
        have = ", ".join(sorted(backend.capabilities.names)) or "none"
        raise CapabilityMissing(
            f"{_name(backend)} does not have the capability {capability.value!r}; its capabilities: {have}"
        )


def _name(backend: object) -> str:
    """Return the class name of the backend itself, not of the wrappers that this package puts around it."""
    while type(backend).__module__.startswith("taskqueue_core.") and hasattr(backend, "inner"):
        backend = backend.inner
    return type(backend).__name__


def control_of(backend: Backend) -> Control:
    """Return the backend's ``control`` attribute, or raise `CapabilityMissing`."""
    _require(backend, Capability.CONTROL)
    return cast("HasControl", backend).control


def dead_letters_of(backend: Backend) -> DeadLetters:
    """Return the backend's ``dead_letters`` attribute, or raise `CapabilityMissing`."""
    _require(backend, Capability.DEAD_LETTERS)
    return cast("HasDeadLetters", backend).dead_letters


def dependencies_of(backend: Backend) -> Dependencies:
    """Return the backend's ``dependencies`` attribute, or raise `CapabilityMissing`."""
    _require(backend, Capability.AFTER)
    return cast("HasDependencies", backend).dependencies


def listing_of(backend: Backend) -> Listing:
    """Return the backend's ``listing`` attribute, or raise `CapabilityMissing`."""
    _require(backend, Capability.LISTING)
    return cast("HasListing", backend).listing


def dead_lettering_of(backend: Backend, subscription: Subscription) -> DeadLettering:
    """Return the subscription, typed as `DeadLettering`, or raise `CapabilityMissing`."""
    _require(backend, Capability.DEAD_LETTERS)
    return cast("DeadLettering", subscription)


def handover_of(backend: Backend, subscription: Subscription) -> Handover:
    """Return the subscription, typed as `Handover`, or raise `CapabilityMissing`."""
    _require(backend, Capability.HANDOVER)
    return cast("Handover", subscription)


def revocation_of(backend: Backend, subscription: Subscription) -> Revocation:
    """Return the subscription, typed as `Revocation`, or raise `CapabilityMissing`."""
    _require(backend, Capability.REVOCATION)
    return cast("Revocation", subscription)


def slots_of(backend: Backend) -> SlotPool:
    """Return the backend's ``slots`` attribute, or raise `CapabilityMissing`."""
    _require(backend, Capability.SLOTS)
    return cast("HasSlots", backend).slots


def schedules_of(backend: Backend) -> Schedules:
    """Return the backend's ``schedules`` attribute, or raise `CapabilityMissing`."""
    _require(backend, Capability.SCHEDULES)
    return cast("HasSchedules", backend).schedules


def audit_of(backend: Backend) -> Audit:
    """Return the backend's ``audit`` attribute, or raise `CapabilityMissing`."""
    _require(backend, Capability.AUDIT)
    return cast("HasAudit", backend).audit


def streams_of(backend: Backend) -> Streams:
    """Return the backend's ``streams`` attribute, or raise `CapabilityMissing`."""
    _require(backend, Capability.STREAMS)
    return cast("HasStreams", backend).streams
