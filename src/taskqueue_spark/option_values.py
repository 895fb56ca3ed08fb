"""Reading the options that Spark passes. The case of option names does not matter. Errors never quote option values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import check_name

_OF_SPARK = frozenset({"path", "checkpointlocation", "queryname"})
"""options that Spark adds to those of the user; Spark also adds options with a dot in their names"""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class OptionValues(dict[str, str]):
    """Options by name in lower case. The methods raise `InvalidInput` for a value that is not allowed."""

    def __init__(self, options: Mapping[str, str], names: Sequence[str] | None = None) -> None:
        """Read options. With ``names``, raise `ConfigurationError` for others, except those that Spark adds."""
        super().__init__({name.lower(): value for name, value in options.items()})
        if names is None:
            return
        known = {name.lower() for name in names}
        unknown = sorted(name for name in self if name not in known | _OF_SPARK and "." not in name)
        if unknown:
            shown = ", ".join(name[:50] for name in unknown)
            raise ConfigurationError(f"unknown options: {shown}; allowed: {', '.join(names)}")
        if self.get("path") and "path" not in known:
            raise ConfigurationError(
                "option path is not supported: call save() and load() without a path"
            )

    def text(self, name: str) -> str | None:
        """Return the value of an option unchanged; ``None`` if the option is not set."""
        return self.get(name.lower())

    def choice(self, name: str, *allowed: str) -> str:
        """Return the value in lower case, which must be one of ``allowed``; the first one is the default."""
        value = self.get(name.lower(), allowed[0]).lower()
        if value not in allowed:
            raise InvalidInput(f"option {name}", "an unknown value", " or ".join(allowed))
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return whether the value is ``true``; ``default`` if it is not set. Only ``true`` and ``false`` are valid."""
        both = ("true", "false") if default else ("false", "true")
        return self.choice(name, *both) == "true"

    def number(self, name: str, least: float, most: float) -> float | None:
        """Return a number within a range; ``None`` if the option is not set."""
        return self._within(name, float, least, most)

    def whole(self, name: str, least: int, most: int) -> int | None:
        """Return a whole number within a range; ``None`` if the option is not set."""
        number = self._within(name, int, least, most)
        return None if number is None else int(number)

    def _within(self, name: str, kind: type[float], least: float, most: float) -> float | None:
        value = self.text(name)
        if value is None:
            return None
        number = "a whole number" if issubclass(kind, int) else "a number"
        allowed = f"{number} from {least:.12g} to {most:.12g}"
        try:
            result = kind(value)
        except ValueError:
            raise InvalidInput(f"option {name}", f"text that is not {number}", allowed) from None
        if not least <= result <= most:
            raise InvalidInput(f"option {name}", "a number out of range", allowed)
        return result

    def seconds(self, name: str) -> float | None:
        """Return a duration, such as ``90`` or ``5m``, in seconds; ``None`` if the option is not set."""
        value = self.text(name)
        if value is None:
            return None
        number, unit = (value[:-1], value[-1]) if value[-1:] in _UNITS else (value, "s")
        try:
            seconds = float(number) * _UNITS[unit]
        except ValueError:
            seconds = -1
        if not 0 < seconds < 1e9:  # noqa: PLR2004 - the limit is about 30 years; the comparison also refuses NaN
            allowed = "a positive duration below 1e9 seconds, as seconds (90) or with the unit s, m, h or d (5m)"
            raise InvalidInput(
                f"option {name}", "text that is not a duration, or a duration out of range", allowed
            )
        return seconds

    def time(self, name: str) -> int | None:
        """Return an ISO 8601 time in microseconds since 1970; ``None`` if the option is not set."""
        value = self.text(name)
        if value is None:
            return None
        try:
            return microseconds(datetime.fromisoformat(value))
        except ValueError:
            allowed = "an ISO 8601 time (2026-01-31T12:00:00Z; UTC by default)"
            raise InvalidInput(f"option {name}", "text that is not a time", allowed) from None

    def names(self, name: str) -> tuple[str, ...] | None:
        """Return a list of names that are separated by commas; ``None`` if the option is not set."""
        value = self.text(name)
        if value is None:
            return None
        names = tuple(filter(None, map(str.strip, value.split(","))))
        if not names:
            raise InvalidInput(
                f"option {name}", "a list without names", "names separated by commas"
            )
        return names

    def queue(self) -> str | None:
        """Return the option ``queue``, the queue of rows that name none; ``None`` if it is not set."""
        value = self.text("queue")
        if value is not None:
            check_name("option queue", value)
        return value


def microseconds(moment: datetime) -> int:
    """Return a time in microseconds since 1970. A time without a time zone is UTC."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
