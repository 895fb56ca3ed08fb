"""JSON Schema of the limits that `taskqueue_core.limits` checks, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from taskqueue_core.limits import LIMITS

END_OF_TIME = 253_402_300_799
CENTURY = 100 * 366 * 86_400
NAME: dict[str, Any] = {
    "type": "string",
    "minLength": 1,
    "maxLength": LIMITS.name,
    "pattern": "^[A-Za-z0-9_<][A-Za-z0-9._:@=+<>~-]*$",
}


def meta_of(**schema: Any) -> Meta:
    """Return an annotation that adds to the schema of a type, and checks nothing."""
    return Meta(extra_json_schema=schema)


_BOUNDS = {"minLength": 1, "maxLength": LIMITS.name}
Name = Annotated[str, meta_of(**_BOUNDS, pattern=NAME["pattern"])]
"""a key, id, tenant or ordering key"""
LABEL: dict[str, Any] = {"type": "string", **_BOUNDS}
Label = Annotated[str, meta_of(**_BOUNDS)]
"""the name of a model or a server, or the token of a retry: any printable text"""
Priority = Annotated[int, meta_of(minimum=0, maximum=9)]
Attempts = Annotated[int, meta_of(minimum=1, maximum=1000)]
Instant = Annotated[float, meta_of(minimum=0, exclusiveMaximum=END_OF_TIME + 1)]
"""a time in Unix seconds"""
Seconds = Annotated[float, meta_of(minimum=0, maximum=CENTURY)]
Text = Annotated[str, meta_of(minLength=1, maxLength=LIMITS.text)]
HeadersField = Annotated[dict[str, str], meta_of(maxProperties=LIMITS.headers)]
_TAGS = meta_of(maxItems=LIMITS.tags, uniqueItems=True)
Tags = Annotated[tuple[Annotated[str, meta_of(minLength=1, maxLength=LIMITS.tag)], ...], _TAGS]
"""texts by which a task can be found, if the setting ``index`` of its queue names them"""
ContentDigest = Annotated[bytes, meta_of(minLength=24, maxLength=88)]
"""16 to 64 bytes, in base64"""
