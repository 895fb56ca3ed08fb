"""Unique keys: a queue has at most one live task with such a key, whatever the ids of the tasks are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_choice, check_duration, check_name, kind_of

__all__ = ["Debounce", "OnConflict", "Unique", "UniqueKey", "Until"]

Until = Literal["ended", "started"]
OnConflict = Literal["keep", "replace", "refuse"]
_UNTIL, _ON_CONFLICT = ("ended", "started"), ("keep", "replace", "refuse")


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 of data."""
    return hashlib.sha256(data).digest()


class Debounce(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each publish with the same unique key replaces the one before, and puts the task off again.

    Raises `InvalidInput`.

    >>> debounce = Debounce(seconds=30, max_wait=300)
    """

    seconds: float
    """seconds from the last publish until the task is due"""
    max_wait: float | None = None
    """maximum number of seconds from the first publish until the task is due; ``None`` means no limit"""

    def __post_init__(self) -> None:
        _check_positive("debounce.seconds", self.seconds)
        if self.max_wait is not None:
            _check_positive("debounce.max_wait", self.max_wait)
            if self.max_wait < self.seconds:
                raise InvalidInput(
                    "debounce.max_wait", "less than seconds", "seconds, or a larger number"
                )


class UniqueKey(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A key that at most one task of a queue holds. Raises `InvalidInput`.

    The task that is stored first holds the key while it is live: scheduled, waiting or in flight. A dead letter holds
    nothing. The store decides in the step of the publish, after it has looked for the id.

    >>> unique = UniqueKey(key="rebuild-7", on_conflict="replace")
    """

    key: str
    """the key, by the rule of names; publishers derive it from what makes two tasks the same work"""
    until: Until = "ended"
    """when the task gives the key back: when it has ended, or already when it is delivered for the first time"""
    period: float | None = None
    """seconds from the publish during which the task holds the key in any case, even after its end"""
    on_conflict: OnConflict = "keep"
    """what a publish does whose key is held

    ``keep``: it stores nothing, and the answer is ``duplicate``. ``refuse``: it is refused with ``not_unique``.
    ``replace``: if the holder was never delivered, it gets the contents and the time of the new task, and still waits
    for the tasks that it waited for; if it was, and it is not in its period, the new task is stored as well.
    """
    debounce: Debounce | None = None
    """the time of the task, by the store's clock; needs ``replace``"""

    def __post_init__(self) -> None:
        check_name("unique.key", self.key)
        check_choice("unique.until", self.until, _UNTIL)
        check_choice("unique.on_conflict", self.on_conflict, _ON_CONFLICT)
        if self.period is not None:
            _check_positive("unique.period", self.period)
        if self.debounce is None:
            return
        if not isinstance(self.debounce, Debounce):
            raise InvalidInput("debounce", kind_of(self.debounce), "a Debounce, or None")
        if self.on_conflict != "replace":
            got = f"a debounce with on_conflict {self.on_conflict!r}"
            raise InvalidInput("debounce", got, "a debounce with on_conflict 'replace'")

    def due_at(self, not_before: float | None, now: float, first: float) -> float | None:
        """Return when a task is due that is published now: ``not_before``, unless the key has a debounce.

        ``first``: the time of the first publish, which counts for ``max_wait``.
        """
        if self.debounce is None:
            return not_before
        at = now + self.debounce.seconds
        return at if self.debounce.max_wait is None else min(at, first + self.debounce.max_wait)


class Unique(msgspec.Struct, frozen=True):
    """What makes two publishes the same work, so that their tasks have the same unique key. Raises `InvalidInput`.

    >>> @tasks.task(unique=Unique(by=("user",)))
    ... async def reindex(user: int, reason: str = "asked for") -> None: ...
    >>> first, again = await reindex.publish(7), await reindex.publish(7, reason="edited")
    >>> again.id == first.id
    True
    """

    by: tuple[str, ...] | Literal["all"] = "all"
    """the arguments that count, or all of them; ``()``: none, so that all tasks of this name are the same work"""
    until: Until = "ended"
    """when a task gives its key back: when it has ended, or already when it is delivered for the first time"""
    period: float | None = None
    """seconds from the publish during which a task holds its key in any case, even after its end"""
    per_tenant: bool = True
    """whether tasks of different tenants are different work"""
    on_conflict: OnConflict = "keep"
    """what a publish does whose key is held: see `UniqueKey.on_conflict`"""

    def __post_init__(self) -> None:
        names: object = self.by
        if names != "all" and not (
            isinstance(names, tuple) and all(isinstance(name, str) for name in names)
        ):
            got = kind_of(names)
            raise InvalidInput("unique.by", got, "a tuple of names, as in by=('user',), or 'all'")
        per_tenant: object = self.per_tenant
        if not isinstance(per_tenant, bool):
            raise InvalidInput("unique.per_tenant", kind_of(per_tenant), "True or False")
        self.key("x", {} if self.by == "all" else dict.fromkeys(self.by))  # checks the other fields

    def key(
        self,
        name: str,
        arguments: Any,
        tenant: str | None = None,
        digest: Callable[[bytes], bytes] = sha256,
    ) -> UniqueKey:
        """Return the unique key of a task with this name and these arguments, as decoded JSON. Raises `InvalidInput`.

        The key consists of the first 32 hexadecimal digits of the SHA-256 of a JSON array: the name, the chosen
        arguments as an object with sorted names (with ``all``, all of the payload), and the tenant, or null. It is
        written without spaces, with other characters than ASCII escaped. ``digest`` replaces SHA-256: that of a codec
        with keys cannot be computed without them.
        """
        chosen = arguments if self.by == "all" else self._chosen(arguments)
        work = [name, chosen, tenant if self.per_tenant else None]
        text = json.dumps(work, sort_keys=True, separators=(",", ":"))
        return UniqueKey(
            key=digest(text.encode()).hex()[:32],
            until=self.until,
            period=self.period,
            on_conflict=self.on_conflict,
        )

    def _chosen(self, arguments: Any) -> dict[str, Any]:
        if not isinstance(arguments, Mapping):
            raise InvalidInput(
                "unique.by", f"names, for a payload that is {kind_of(arguments)}", "'all'"
            )
        for name in self.by:
            if name not in arguments:
                raise InvalidInput(
                    "unique.by", f"{name!r}, which the payload does not have", "its names"
                )
        return {name: arguments[name] for name in self.by}


def key_of(
    unique: Unique | UniqueKey | None,
    debounce: Debounce | None,
    name: str,
    text: bytes,
    options: Mapping[str, Any],
) -> UniqueKey | None:
    """Return the unique key that the options of a publish ask for. Raises `InvalidInput`.

    ``text``: the payload as JSON text; ``options``: the other options, of which ``tenant`` counts.
    """
    if isinstance(unique, Unique):
        unique = unique.key(name, json.loads(text), options.get("tenant"))
    elif unique is not None and not isinstance(unique, UniqueKey):
        raise InvalidInput("unique", kind_of(unique), "a Unique, a UniqueKey, or None")
    if debounce is None:
        return unique
    if unique is None:
        raise InvalidInput(
            "debounce", "a debounce without a unique key", "a debounce and unique=Unique(...)"
        )
    if unique.on_conflict == "refuse":
        raise InvalidInput(
            "debounce", "a debounce with on_conflict 'refuse'", "'keep' or 'replace'"
        )
    return msgspec.structs.replace(unique, debounce=debounce, on_conflict="replace")


def check_unique(unique: object, not_before: float | None, ordering_key: str | None) -> None:
    """Check that a task with this unique key may have the other fields. Raises `InvalidInput`."""
    if not isinstance(unique, UniqueKey):
        raise InvalidInput("unique", kind_of(unique), "a UniqueKey, or None")
    if unique.debounce is None:
        return
    if not_before is not None:
        raise InvalidInput(
            "debounce", "a debounce and a time (delay or not_before)", "only one of them"
        )
    if ordering_key is not None:
        raise InvalidInput(
            "debounce",
            "a debounce and an ordering key, whose order it would change",
            "only one of them",
        )


def _check_positive(field: str, value: object) -> None:
    check_duration(field, value)
    if not value:
        raise InvalidInput(field, "0", "a number of seconds above 0")
