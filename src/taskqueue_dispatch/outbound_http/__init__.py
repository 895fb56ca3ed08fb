"""Requests to places that a client has named: what may be reached at all, and nothing but that is connected to."""

from taskqueue_dispatch.outbound_http.dns import Recently, Resolve, look_up
from taskqueue_dispatch.outbound_http.errors import NameUnknown, NotReached
from taskqueue_dispatch.outbound_http.post import Reply, post, trusted
from taskqueue_dispatch.outbound_http.url_policy import Checked, Policy, check_url
from taskqueue_dispatch.outbound_http.urls import read_url

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
