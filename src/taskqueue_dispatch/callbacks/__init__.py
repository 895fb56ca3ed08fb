"""Callbacks: what became of a job, told to the URL that its client gave, as tasks of a queue of their own."""

from taskqueue_dispatch.callbacks.policy import policy_of
from taskqueue_dispatch.callbacks.records import CallbackRecord
from taskqueue_dispatch.callbacks.sender import Sender
from taskqueue_dispatch.callbacks.signature import Signer
from taskqueue_dispatch.callbacks.tasks import CALLBACK_URL, callback_id, callback_task, expiry_task

__all__ = [
    "CALLBACK_URL",
    "CallbackRecord",
    "Sender",
    "Signer",
    "callback_id",
    "callback_task",
    "expiry_task",
    "policy_of",
]
