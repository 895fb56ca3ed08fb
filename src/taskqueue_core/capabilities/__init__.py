"""The optional capabilities of a backend: one protocol per capability, which the conformance kit tests."""

from taskqueue_core.capabilities.control import Control, DeletedQueue, LongPolling, Maintained
from taskqueue_core.capabilities.dead_letters import DeadLetters
from taskqueue_core.capabilities.require import (
    HasControl,
    HasDeadLetters,
    HasSlots,
    control_of,
    dead_lettering_of,
    dead_letters_of,
    handover_of,
    has,
    revocation_of,
    slots_of,
)
from taskqueue_core.capabilities.room import RoomSignal, RoomSignals
from taskqueue_core.capabilities.settings import (
    DECLARABLE,
    Durability,
    Order,
    Owner,
    QueueSettings,
)
from taskqueue_core.capabilities.slots import (
    Endpoint,
    EndpointInfo,
    Left,
    Permit,
    PoolView,
    Seen,
    SlotLease,
    SlotPool,
)
from taskqueue_core.capabilities.subscriptions import DeadLettering, Handover, Revocation

__all__ = [
    "DECLARABLE",
    "Control",
    "DeadLettering",
    "DeadLetters",
    "DeletedQueue",
    "Durability",
    "Endpoint",
    "EndpointInfo",
    "Handover",
    "HasControl",
    "HasDeadLetters",
    "HasSlots",
    "Left",
    "LongPolling",
    "Maintained",
    "Order",
    "Owner",
    "Permit",
    "PoolView",
    "QueueSettings",
    "Revocation",
    "RoomSignal",
    "RoomSignals",
    "Seen",
    "SlotLease",
    "SlotPool",
    "control_of",
    "dead_lettering_of",
    "dead_letters_of",
    "handover_of",
    "has",
    "revocation_of",
    "slots_of",
]
