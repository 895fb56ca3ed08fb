"""Writing what registries declare into the store: the settings of queues, and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError

from taskqueue_core.application.declared_schedules import (
    AppliedSchedule,
    DeclaredSchedules,
    apply_schedules,
    demand_schedules,
)
from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import DECLARABLE, Owner, QueueSettings, control_of, has
from taskqueue_core.errors import CapabilityMissing, ConfigurationError, InvalidInput
from taskqueue_core.policy_model import describe
from taskqueue_core.queue import Queue
from taskqueue_core.queue_settings import change_settings

_READS = 4
"""maximum number of times that the settings of a queue are read, if other programs keep changing them"""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A field of a queue's settings whose value in the store is not the declared one.

    >>> @tasks.task(timeout=30)
    ... def crop(image: str) -> None: ...
    >>> [(each.field, each.declared) for each in (await tasks.apply(dry_run=True)).changed]
    [('retry', ...), ('timeout', 30.0)]
    """

    key: str
    """name of the queue"""
    field: str
    stored: Any
    declared: Any
    """the declared value; the default, if the field is declared no more"""


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What `taskqueue_core.Tasks.apply` has changed and kept; with ``dry_run``, what it would change and keep.

    >>> applied = await tasks.apply(dry_run=True)
    >>> len(applied.kept)
    0
    """

    changed: tuple[Difference, ...] = ()
    kept: tuple[Difference, ...] = ()
    """fields that an operator owns; they are not changed"""
    undeclared: tuple[Difference, ...] = ()
    """fields that a declaration set before and names no more; only ``prune`` resets them"""
    schedules: tuple[AppliedSchedule, ...] = ()
    """schedules that are not stored as they are declared, with what was done"""


class Comparison:
    """The declaration of a queue, compared with its settings in the store."""

    def __init__(
        self, key: str, declared: Mapping[str, Any], settings: QueueSettings, *, prune: bool = False
    ) -> None:
        self.changed: list[Difference] = []
        self.kept: list[Difference] = []
        self.undeclared: list[Difference] = []
        self._key, self._settings = key, settings
        self._owners = dict(settings.owners)
        for field in DECLARABLE:
            stored = getattr(settings, field)
            default = QueueSettings.model_fields[field].default
            wanted = declared.get(field, default)
            different = Difference(key=key, field=field, stored=stored, declared=wanted)
            if field in declared:
                owner = settings.owners.get(field) if stored == wanted else settings.owner_of(field)
                if owner is not Owner.OPERATOR:
                    self._owners[field] = Owner.DECLARED
                    self.changed += [different] if stored != wanted else []
                elif stored != wanted:
                    self.kept.append(different)
            elif settings.owners.get(field) is Owner.DECLARED:
                if prune:
                    del self._owners[field]
                if stored != wanted:
                    (self.changed if prune else self.undeclared).append(different)

    def applied(self) -> QueueSettings:
        """Return the settings with the declared values. Raises `ConfigurationError` if other values contradict them."""
        values = {difference.field: difference.declared for difference in self.changed}
        wanted = self._settings.model_copy(update={**values, "owners": self._owners})
        try:
            return QueueSettings.model_validate(wanted.model_dump())
        except ValidationError as error:
            raise ConfigurationError(
                f"queue {self._key!r}: {describe(error, QueueSettings.model_fields)}; an operator has set one of them: "
                f"change it, or give it back with 'taskqueue queue set {self._key} --give-back FIELD'"
            ) from None


async def apply_declarations(
    backend: Backend,
    declared: Mapping[str, Mapping[str, Any]],
    schedules: Sequence[DeclaredSchedules] = (),
    *,
    prune: bool,
    dry_run: bool,
) -> Applied:
    """Write the declared settings of each queue in one change, without those that an operator owns, and then schedules.

    Raises `CapabilityMissing` before anything is written if the backend lacks a capability, `SettingsConflict` if other
    programs keep changing the settings, `ConfigurationError` and `BackendUnavailable`.
    """
    control = control_of(backend)
    queue = Queue(backend)
    demand_schedules(queue, schedules)
    for key, fields in declared.items():
        _demand_capabilities(backend, key, fields)
    results: list[Comparison] = []
    for key, fields in declared.items():
        comparisons: list[Comparison] = []

        def edit(settings: QueueSettings) -> QueueSettings:
            comparisons.append(Comparison(key, fields, settings, prune=prune))  # noqa: B023 - called in this pass
            return comparisons[-1].applied()  # noqa: B023 - called in this pass

        try:
            if dry_run:
                edit(await control.settings(key))
            else:
                await change_settings(control, key, edit, reads=_READS)
        except InvalidInput as error:
            raise _unsupported(backend, key, error.field) from error
        results.append(comparisons[-1])
    return Applied(
        changed=tuple(each for result in results for each in result.changed),
        kept=tuple(each for result in results for each in result.kept),
        undeclared=tuple(each for result in results for each in result.undeclared),
        schedules=await apply_schedules(queue, schedules, prune=prune, dry_run=dry_run),
    )


def _demand_capabilities(backend: Backend, key: str, fields: Mapping[str, Any]) -> None:
    settings = QueueSettings.model_validate(fields)
    needed = {
        Capability.FLOW: settings.flow,
        Capability.FAIR_ORDER: settings.fair_order,
        Capability.FLOOR_SHARE: ["floor_share"] if settings.floor_share else [],
    }
    for capability, names in needed.items():
        for field in () if has(backend, capability) else names:
            raise _unsupported(backend, key, field)


def _unsupported(backend: Backend, key: str, field: str) -> CapabilityMissing:
    return CapabilityMissing(
        f"{field}: the backend {type(backend).__name__} cannot keep this setting of the queue {key!r}: remove it from "
        "the declaration of the task, or use another backend"
    )
