"""The form for a queue's settings: its fields, and their conversion from and to `QueueSettings`."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import InvalidInput, SettingsConflict
from taskqueue_core.queue_settings import read_settings
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import RequestContext

_UNITS = (("SECONDS", "seconds"), ("MINUTES", "minutes"), ("HOURS", "hours"))
_ORDERS = (("fifo", "First in, first out"), ("fair", "Fair by tenant"))


class Field(NamedTuple):
    """One field of the form."""

    name: str
    label: str
    hint: str
    options: tuple[tuple[str, str], ...] = ()
    whole: bool = True


class Group(NamedTuple):
    """A group of related fields in the form."""

    label: str
    fields: tuple[Field, ...]


_LIMITS = (
    Field("capacity", "Capacity", "maximum number of undelivered tasks; empty: no limit"),
    Field(
        "max_inflight",
        "In flight",
        "maximum number of running tasks across all workers; empty: no limit",
    ),
    Field(
        "max_processing_time",
        "Processing time",
        "maximum number of seconds without progress; empty: no limit",
        whole=False,
    ),
    Field(
        "timeout",
        "Timeout",
        "seconds after which an attempt fails; empty: no limit",
        whole=False,
    ),
    Field("max_losses", "Losses", "a task that is lost more often than this becomes a dead letter"),
)
_BURST = "maximum per interval, and also the largest burst; empty: no limit"
_RATE = (
    Field("rate_limit.max_tokens", "Deliveries", _BURST),
    Field("rate_limit.interval", "Interval", "number of units; empty: 1"),
    Field("rate_limit.interval_unit", "Unit", "", _UNITS),
)
_SHARE = "0 to 0.5: share of deliveries reserved for each priority"
_ORDER = (
    Field("order", "Order", "within each priority", _ORDERS),
    Field("floor_share", "Floor share", _SHARE, whole=False),
    Field("tenant_capacity", "Capacity per tenant", "with fair order only; empty: no limit"),
    Field("tenant_max_inflight", "In flight per tenant", "with fair order only; empty: no limit"),
)
_RETRY = (
    Field(
        "retry.max_attempts",
        "Attempts",
        "maximum number of attempts before a task becomes a dead letter",
    ),
    Field("retry.base", "First delay", "seconds", whole=False),
    Field("retry.factor", "Factor", "by which the delay grows with each retry", whole=False),
    Field("retry.cap", "Maximum delay", "seconds", whole=False),
    Field(
        "retry.delays",
        "Delays",
        "seconds, such as 5, 60, 900: instead of the three above",
        whole=False,
    ),
)
GROUPS = (
    Group("Limits", _LIMITS),
    Group("Rate", _RATE),
    Group("Order", _ORDER),
    Group("Retry", _RETRY),
)
_FIELDS = {field.name: field for group in GROUPS for field in group.fields}
NAMES = tuple(_FIELDS)
_EXPECTED = {"retry.delays": "Enter numbers, separated by commas."}
_PLAIN = 1e6
_MOST = 1e15
_OPTIONAL = {
    "capacity",
    "max_inflight",
    "max_processing_time",
    "timeout",
    "tenant_capacity",
    "tenant_max_inflight",
}


class FormError(Exception):
    """An error for invalid values in the form."""

    def __init__(self, errors: dict[str, str]) -> None:
        super().__init__("invalid values in the form")
        self.errors = errors


def fields(settings: QueueSettings) -> dict[str, str]:
    """Return the settings as values of the form's fields."""
    return {name: _shown(_value_of(settings.model_dump(mode="json"), name)) for name in NAMES}


def _value_of(value: Any, name: str) -> Any:
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) and value < _PLAIN else str(value)


def changed(settings: QueueSettings, filled: dict[str, str], version: str) -> QueueSettings:
    """Return the settings with the values of the form.

    Raises `FormError` for text that is not a number, `InvalidInput` for a value that is not allowed, and
    `SettingsConflict` if the form was made from another version of the settings.
    """
    if version != str(settings.version):
        raise SettingsConflict("these settings were changed in the meantime")
    errors: dict[str, str] = {}
    before, values = fields(settings), settings.model_dump(mode="json")
    for name, text in filled.items():
        if text == before[name]:
            continue
        parent, _, last = name.rpartition(".")
        try:
            value = _read(_FIELDS[name], text)
        except ValueError:
            errors[name] = _EXPECTED.get(name) or (
                "Enter a whole number." if _FIELDS[name].whole else "Enter a number."
            )
            continue
        if parent == "rate_limit":
            continue
        (values if not parent else values[parent])[last] = value
    values["rate_limit"] = _bucket(filled, errors)
    if errors:
        raise FormError(errors)
    return read_settings(msgspec.json.encode(values))


def _read(field: Field, text: str) -> object:
    if field.options:
        return text
    if field.name == "retry.delays":
        return [float(part) for part in text.split(",")] if text else []
    if not text:
        if field.name in _OPTIONAL or field.name.startswith("rate_limit."):
            return None
        raise ValueError
    number = int(text) if field.whole else float(text)
    if not -_MOST < number < _MOST:
        raise ValueError
    return number


def _bucket(filled: dict[str, str], errors: dict[str, str]) -> dict[str, object] | None:
    if not filled["rate_limit.max_tokens"]:
        return None
    bucket: dict[str, object] = {"interval_unit": filled["rate_limit.interval_unit"] or "SECONDS"}
    for name in ("max_tokens", "interval"):
        text = filled[f"rate_limit.{name}"] or "1"
        try:
            bucket[name] = _read(_FIELDS[f"rate_limit.{name}"], text)
        except ValueError:
            errors[f"rate_limit.{name}"] = "Enter a whole number."
    return bucket


def field_errors(error: InvalidInput) -> dict[str, str]:
    """Return the error's message, keyed by field name; the name is empty if the form does not have the field."""
    message = f"Allowed: {error.allowed}."
    field = error.field.rstrip("0123456789").rstrip(
        "."
    )  # an item of a list is an error of the list
    return {field: message} if field in _FIELDS else {"": str(error)}


_FORM = "application/x-www-form-urlencoded"
_MAX_FIELDS = 2000
_FORM_BYTES = 1024 * 1024


class Form:
    """The submitted values of a form."""

    def __init__(self, fields: dict[str, list[str]]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        """Return a field's value without surrounding spaces; an empty string if the field is missing."""
        return self._fields.get(name, [""])[0].strip()

    def all(self, name: str) -> list[str]:
        """Return all values of a field that may be repeated."""
        return self._fields.get(name, [])


async def read_form(
    call: RequestContext, limit: int = _FORM_BYTES, most_fields: int = _MAX_FIELDS
) -> Form:
    """Read the body of a request, at most ``limit`` bytes, as form fields. Raises `ProblemError`."""
    body = await call.read(_FORM, limit, "form")
    try:
        # Browsers send ASCII, and other text takes many times longer to parse.
        fields = parse_qs(
            body.decode("ascii"),
            keep_blank_values=True,
            max_num_fields=most_fields,
            errors="strict",
        )
    except ValueError:
        raise ProblemError(
            400,
            "not_a_form",
            f"the body must be a URL-encoded form of at most {most_fields} fields",
        ) from None
    return Form(fields)
