"""Changing the settings of a queue. The HTTP API and the command line share this code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

import msgspec
from pydantic import BaseModel, ValidationError

from taskqueue_core.capabilities import DECLARABLE, Control, Order, Owner, QueueSettings
from taskqueue_core.errors import InvalidInput, SettingsConflict
from taskqueue_core.limits import check_name, clean_text, kind_of
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.retry import RetryPolicy

_TRIES = 10
_PAUSE = RetryPolicy(base=0.01, cap=0.05, jitter=1)
_PARTS: Mapping[str, type[BaseModel]] = {
    "": QueueSettings,
    "rate_limit": RateLimit,
    "tenant_rate_limit": RateLimit,
    "retry": RetryPolicy,
}


def read_settings(text: bytes) -> QueueSettings:
    """Parse the settings of a queue from a JSON object.

    Raises `InvalidInput` for invalid settings, and for values of a wrong type, even if they could be converted.
    """
    try:
        settings = QueueSettings.model_validate_json(text, strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
    else:
        return _named(settings)
    # A value error without a location means that two settings contradict each other. Its message begins with the name
    # of the setting to change.
    if not fault["loc"] and fault["type"] == "value_error":
        name, _, reason = fault["msg"].removeprefix("Value error, ").partition(" ")
        name, reason = (name[:-1], reason) if name.endswith(":") else (name, f"it {reason}")
        raise InvalidInput(name, kind_of(fault["input"][name]), f"its default, because {reason}")
    path = fault["loc"] or ("settings",)
    if path[0] in ("weights", "owners"):  # omit names, because errors must not repeat input
        path = path[:1]
    *parents, name = map(str, path)
    # Omit the name of an unknown field, because errors must not repeat input.
    if fault["type"] == "extra_forbidden":
        parent = ".".join(parents)
        known = ", ".join(_PARTS[parent].model_fields)
        raise InvalidInput(parent or "settings", "an unknown field", known)
    field = ".".join((*parents, name))
    if fault["type"] == "missing":
        raise InvalidInput(field, "nothing", "a value")
    allowed = fault["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    beyond = " out of range" if allowed.startswith(("greater", "less", "'")) else ""
    raise InvalidInput(field, kind_of(fault["input"]) + beyond, allowed)


def _named(settings: QueueSettings) -> QueueSettings:
    """Return the settings, or raise `InvalidInput` if they contain an invalid name of a queue or a tenant."""
    for field, names in (
        ("moved_to", () if settings.moved_to is None else (settings.moved_to,)),
        ("bound_to", settings.bound_to),
        ("weights", settings.weights),
        ("paused_tenants", settings.paused_tenants),
    ):
        for name in names:
            check_name(field, name)
    return settings


async def change_settings(
    control: Control,
    key: str,
    edit: Callable[[QueueSettings], QueueSettings],
    *,
    version: int | None = None,
    reads: int = _TRIES,
) -> QueueSettings:
    """Replace the current settings with the result of ``edit``. Nothing is written if ``edit`` changes nothing.

    After a concurrent change, ``edit`` is called again with the new settings. Raises `SettingsConflict` if the settings
    have changed each time, after ``reads`` times, or if ``version`` is given and is not the current version.
    """
    check_name("key", key)
    attempt = 0
    while True:
        attempt += 1
        try:
            settings = await control.settings(key)
            if version is not None:
                # This raises `SettingsConflict` if the version is not the current version.
                settings.followed_by(QueueSettings(version=version))
            wanted = edit(settings)
            return settings if wanted == settings else await control.configure(key, wanted)
        except SettingsConflict:
            if version is not None or attempt == reads:
                raise
        await asyncio.sleep(_PAUSE.delay(attempt))


def merge_settings(settings: QueueSettings, patch: Mapping[str, object]) -> QueueSettings:
    """Return the settings changed by a JSON merge patch (RFC 7396). A null resets a setting to its default.

    Raises `InvalidInput`.
    """
    return read_settings(msgspec.json.encode(_merge(settings.model_dump(mode="json"), patch)))


def _merge(target: object, patch: object) -> object:
    """Return ``target`` changed by ``patch`` as section 2 of RFC 7396 defines it."""
    if not isinstance(patch, Mapping):
        return patch
    result: dict[object, object] = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merge(result.get(name), value)
    return result


def name_change(before: QueueSettings, after: QueueSettings) -> tuple[str, str]:
    """Return what a change does, for the audit log: the action, and as details the new values as JSON.

    A change that only pauses or resumes the deliveries, the intake or tenants has a name of its own.

    >>> name_change(QueueSettings(), QueueSettings(paused_tenants=("acme",)))
    ('pause tenant', 'tenant=acme')
    >>> name_change(QueueSettings(), QueueSettings(max_inflight=4))
    ('change settings', 'max_inflight=4')
    """
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    changed = [name for name in new if new[name] != old[name] and name not in ("version", "owners")]
    match changed:
        case ["paused"]:
            return "pause" if after.paused else "resume", "deliveries"
        case ["intake_paused"]:
            return "pause" if after.intake_paused else "resume", "intake"
        case ["paused_tenants"]:
            added = [name for name in after.paused_tenants if name not in before.paused_tenants]
            removed = [name for name in before.paused_tenants if name not in after.paused_tenants]
            if not (added and removed):
                action = "pause tenant" if added else "resume tenant"
                return action, " ".join(f"tenant={name}" for name in added or removed)
    values = (f"{name}={msgspec.json.encode(new[name]).decode()}" for name in changed)
    return "change settings", " ".join(values)


def by_operator(before: QueueSettings, after: QueueSettings) -> QueueSettings:
    """Return ``after``, in which an operator owns each field that differs from ``before``.

    A field whose owner differs already in ``after`` keeps that owner, so an operator may give a field back.
    """
    changed = {
        name: Owner.OPERATOR
        for name in DECLARABLE
        if getattr(before, name) != getattr(after, name)
        and before.owners.get(name) is after.owners.get(name)
    }
    return after.model_copy(update={"owners": after.owners | changed}) if changed else after


def give_back(settings: QueueSettings, names: Iterable[str]) -> QueueSettings:
    """Return the settings, in which fields belong to the declaration again: the next `Tasks.apply` sets them.

    Raises `InvalidInput` for a field that has no owner.
    """
    owners = dict(settings.owners)
    for name in names:
        if name not in DECLARABLE:
            raise InvalidInput("give_back", f"{clean_text(name)!r}", ", ".join(DECLARABLE))
        owners[name] = Owner.DECLARED
    return settings.model_copy(update={"owners": owners})


async def pause_queue(control: Control, key: str, *, intake: bool, paused: bool) -> QueueSettings:
    """Pause or resume a queue's deliveries or, with ``intake``, its publishing. Raises `SettingsConflict`."""
    flag = {"intake_paused" if intake else "paused": paused}
    return await change_settings(control, key, lambda settings: settings.model_copy(update=flag))


async def pause_tenant(control: Control, key: str, tenant: str, *, paused: bool) -> QueueSettings:
    """Pause or resume the deliveries of one tenant of a queue, which must have fair order. Idempotent.

    Raises `InvalidInput`, also beyond 1,000 paused tenants of a queue, and `SettingsConflict`.
    """
    check_name("tenant", tenant)

    def edit(settings: QueueSettings) -> QueueSettings:
        names = settings.paused_tenants
        if paused == (tenant in names):
            return settings
        if settings.order is not Order.FAIR:
            raise InvalidInput(
                "tenant", "one of a queue in fifo order", "those of a queue in fair order"
            )
        changed = [*names, tenant] if paused else [name for name in names if name != tenant]
        return merge_settings(settings, {"paused_tenants": changed})

    return await change_settings(control, key, edit)


async def reset_settings(
    control: Control, key: str, *, version: int | None = None
) -> QueueSettings:
    """Reset all settings, except the version number, to their defaults; nothing owns them then.

    Raises `SettingsConflict`.
    """
    return await change_settings(
        control, key, lambda settings: QueueSettings(version=settings.version), version=version
    )
