"""Callbacks: signed requests that report the end of a job to its client, sent as tasks of their own queue."""

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
