"""HTTP requests to URLs that clients supply.

The host's addresses are checked, and connections are made only to them.
"""

from taskqueue_dispatch.outbound_http.dns import CachedLookup, Resolve, look_up
from taskqueue_dispatch.outbound_http.errors import NameUnknown, NotReached
from taskqueue_dispatch.outbound_http.post import PostReply, post, trusted
from taskqueue_dispatch.outbound_http.url_policy import Checked, UrlPolicy, check_url
from taskqueue_dispatch.outbound_http.urls import read_url

__all__ = [
    "CachedLookup",
    "Checked",
    "NameUnknown",
    "NotReached",
    "PostReply",
    "Resolve",
    "UrlPolicy",
    "check_url",
    "look_up",
    "post",
    "read_url",
    "trusted",
]
