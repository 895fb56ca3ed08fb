"""Requests to places that a client has named: what may be reached at all, and nothing but that is connected to."""

from taskqueue_dispatch.egress.checking import Checked, Policy, check_url
from taskqueue_dispatch.egress.errors import NameUnknown, NotReached
from taskqueue_dispatch.egress.looking_up import Recently, Resolve, look_up
from taskqueue_dispatch.egress.posting import Reply, post, trusted
from taskqueue_dispatch.egress.urls import read_url

__all__ = [
    "Checked",
    "NameUnknown",
    "NotReached",
    "Policy",
    "Recently",
    "Reply",
    "Resolve",
    "check_url",
    "look_up",
    "post",
    "read_url",
    "trusted",
]
