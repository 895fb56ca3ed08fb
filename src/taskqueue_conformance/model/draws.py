"""Random values for the queue state machine. There are few values of each kind, so that calls often share a value."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from taskqueue_conformance.bench import KEY, OTHER
from taskqueue_core.after import TaskRef
from taskqueue_core.capabilities import Order
from taskqueue_core.rate_limit import RateLimit

KEYS = (KEY, OTHER)
WORKERS = ("w1", "w1", "w2")

keys = st.sampled_from(KEYS)
names = st.sampled_from(["t1", "t2", "t3", "t4", "t5", "t6", "t7"])
delays = st.sampled_from([None, None, None, None, None, 1, 3])
batch_names = st.sampled_from(["b1", "b2"])
batches = st.lists(names, min_size=1, max_size=6)
_batch_refs = st.builds(TaskRef, st.just(KEY), batch_names)
_refs = st.one_of(*[st.builds(TaskRef, keys, names)] * 3, _batch_refs)
_uniques = st.fixed_dictionaries(
    {
        "key": st.sampled_from(["u", "u", "v"]),
        "until": st.sampled_from(["ended", "ended", "started"]),
        "period": st.sampled_from([None, None, None, 2, 8]),
        "on_conflict": st.sampled_from(["replace", "replace", "keep", "refuse"]),
        "debounce": st.sampled_from([None, None, None, (1, None), (2, 3)]),
    }
)
_afters = st.fixed_dictionaries(
    {
        "tasks": st.lists(_refs, min_size=1, max_size=3, unique=True),
        "when": st.sampled_from(["done", "done", "ended", "failed"]),
        "on_dead": st.sampled_from(["hold", "hold", "cancel"]),
        "inputs": st.booleans(),
    }
)
tasks = st.fixed_dictionaries(
    {
        "payload": st.sampled_from([1, 1, 1, 2]),
        "digest": st.sampled_from([None, None, None, None, 1, 2]),
        "unique": st.one_of(*[st.none()] * 3, _uniques),
        "after": st.one_of(*[st.none()] * 2, _afters),
        "batch": st.one_of(*[st.none()] * 3, _batch_refs),
        "priority": st.sampled_from([5, 5, 8, 2]),
        "tenant": st.sampled_from(["a", "b", None]),
        "ordering_key": st.sampled_from([None, None, "e"]),
        "not_before": delays,
        "deadline": delays,
    }
)
"""fields of a random task; times are relative to now, in the state machine's units of time"""
schedules = st.sampled_from(["s1", "s2"])
versions = st.sampled_from([None, None, 0, 1])
"""the version that a change of a schedule names: none, the current one, or another one"""
owners = st.integers(0, len(WORKERS) - 1)
tellers = st.sampled_from([None] * len(WORKERS) + list(range(len(WORKERS))))
"""index of the subscription that reports a loss; ``None`` means the subscription that owns the delivery"""
_tokens = st.sampled_from([None, None, None, RateLimit(max_tokens=1)])
bounds: dict[str, st.SearchStrategy[Any]] = {
    "capacity": st.sampled_from([None, None, 2, 4]),
    "max_inflight": st.sampled_from([None, None, None, 1, 2]),
    "rate_limit": _tokens,
    "max_processing_time": st.sampled_from([None, None, 2, 4]),
    "timeout": st.sampled_from([None, None, 30.0, 0.25]),
}
"""limits of a queue; ``max_processing_time`` is in the state machine's units of time"""
_rarely = st.sampled_from([False] * 5 + [True])
pauses = {"paused": _rarely, "intake_paused": _rarely}
_shares = st.sampled_from([0.0, 0.0, 0.5])
arrangements: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries(
        {
            "order": st.just(Order.FIFO),
            "weights": st.just({}),
            "paused_tenants": st.just(()),
            "tenant_capacity": st.none(),
            "tenant_max_inflight": st.none(),
            "tenant_rate_limit": st.none(),
            "floor_share": _shares,
        }
    ),
    st.fixed_dictionaries(
        {
            "order": st.just(Order.FAIR),
            "weights": st.sampled_from([{}, {}, {"a": 3}]),
            "paused_tenants": st.sampled_from([(), (), (), ("a",)]),
            "tenant_capacity": st.sampled_from([None, None, None, 1]),
            "tenant_max_inflight": st.sampled_from([None, None, None, 1]),
            "tenant_rate_limit": _tokens,
            "floor_share": _shares,
        }
    ),
)
"""a delivery order, the tenant settings that this order allows, and a floor share"""
places = st.integers(0, 15)
"""index of a delivery, counted back from the latest one; after the oldest, counting starts again at the latest"""
