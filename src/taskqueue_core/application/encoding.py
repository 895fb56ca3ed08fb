"""How the codec of a registry is applied: to payloads, to results, and to the texts of errors.

The header `CODEC_HEADER` of a task lists what encoded its payload, in this order: ``zlib+fernet:2026-11`` are two
codecs, of which the second one used the key ``2026-11``. The payload is the encoded bytes as a JSON string in base64.
In the task of a schedule that fills in instants, it is an object: the member with the empty name is that string, and
the others are added to the decoded object. A result is a JSON string that consists of the name of the header, a space,
its value, a space, and base64; so is the message in the text of an error.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from taskqueue_core.application.codecs import AnyCodec, Codec, CodecChain, check_codec
from taskqueue_core.application.errors import Undecodable
from taskqueue_core.errors import ConfigurationError, TooLarge
from taskqueue_core.limits import LIMITS, check_digest, kind_of

CODEC_HEADER = "taskqueue-codec"
"""header with the names of the codecs that encoded the payload of a task, and of their keys"""
_MARK = f"{CODEC_HEADER} "
_MARKED_RESULT = f'"{_MARK}'.encode()
_OTHER = re.compile(r"[^A-Za-z0-9_.:+-]")
_MARKED_TEXT = re.compile(rf"{CODEC_HEADER} ([A-Za-z0-9_.:+-]+) ([A-Za-z0-9+/=]+)")
_ENCODED = ""
"""name of the member with the encoded arguments, in the payload of a schedule that fills in instants"""
_MOST_NAME = 200
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)


class Encoding:
    """The codec of one registry. Thread-safe."""

    def __init__(self, codec: AnyCodec) -> None:
        """Check the codec. Raises `ConfigurationError`."""
        if not isinstance(codec, CodecChain):
            check_codec(codec)
            codec = CodecChain(codec)
        self._codecs = codec.codecs
        keyed = [each for each in self._codecs if each.key_id is not None]
        self._digests = (keyed or self._codecs)[-1]

    @property
    def header(self) -> str:
        """The value of `CODEC_HEADER` for what is encoded now."""
        return "+".join(
            each.name if each.key_id is None else f"{each.name}:{each.key_id}"
            for each in self._codecs
        )

    def digest(self, data: bytes) -> bytes:
        """Return the digest of data, by the last codec with keys if there is one. Raises `InvalidInput`."""
        digest = self._digests.digest(data)
        check_digest(f"digest of the codec {self._digests.name}", digest)
        return digest

    def content_digest(self, task_id: str, text: bytes) -> bytes:
        """Return the digest of the content of a task; tasks with equal contents have different ones."""
        return self.digest(task_id.encode() + b"\n" + text)

    def payload(self, text: bytes) -> bytes:
        """Encode JSON text as a payload. Raises `TooLarge`."""
        return self._within("payload", b'"%b"' % self._base64(text))

    def template(self, text: bytes, *, instants: bool) -> bytes:
        """Encode the payload of a schedule, which fills in instants or does not. Raises `TooLarge`."""
        payload = self.payload(text)
        return b'{"%b":%b}' % (_ENCODED.encode(), payload) if instants else payload

    def result(self, text: bytes) -> bytes:
        """Encode a result. The caller checks its size."""
        return b'%b%b %b"' % (_MARKED_RESULT, self.header.encode(), self._base64(text))

    def error(self, text: str, most: int = LIMITS.text) -> str:
        """Encode the message of an error, whose end is cut off if it would have more than ``most`` characters."""
        while True:
            data = self._base64(text.encode("utf-8", "replace")).decode()
            encoded = f"{_MARK}{self.header} {data}"
            if len(encoded) <= most or not text:
                return encoded
            text = text[: min(len(text) - 1, len(text) * most // len(encoded))]

    def error_of(self, kind: str, message: str) -> str:
        """Return the text of an exception of the class ``kind``, which stays readable."""
        kind = kind[:_MOST_NAME]
        return f"{kind}: {self.error(message, LIMITS.text - len(kind) - 2)}" if message else kind

    def _base64(self, data: bytes) -> bytes:
        for codec in self._codecs:
            data = codec.encode(data)
            if not isinstance(data, bytes):
                raise ConfigurationError(
                    f"codec {codec.name}: encode returned a {type(data).__name__}; expected bytes"
                )
        return base64.b64encode(data)

    def _within(self, field: str, encoded: bytes) -> bytes:
        if len(encoded) > LIMITS.payload:
            got = f"{len(encoded)} bytes as encoded by {self.header}"
            raise TooLarge(field, got, f"at most {LIMITS.payload} bytes (limit payload)")
        return encoded

    def decoded(self, header: str, data: str) -> bytes:
        """Decode base64 text. ``header`` names the codecs that encoded it. Raises `Undecodable`."""
        try:
            decoded = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise Undecodable(
                f"it is not base64, although it is encoded ({shown(header)})"
            ) from None
        by_name = {each.name: each for each in self._codecs}
        known = ", ".join(by_name)
        for step in reversed(header.split("+")):
            name, _, key_id = step.partition(":")
            codec = by_name.pop(
                name, None
            )  # each counts once, so a header cannot ask for more work
            if codec is None:
                raise Undecodable(
                    f"it is encoded ({shown(header)}), and the registry has only the codecs {known}"
                )
            decoded = _decoded(codec, decoded, key_id or None)
        return decoded


def demand_codec(encoding: Encoding | None, included: Encoding | None, prefix: str) -> None:
    """Raise `ConfigurationError` if a registry has a codec, and one that it includes, with a prefix, has none."""
    if encoding is not None and included is None:
        raise ConfigurationError(
            f"include: this registry has a codec, and the one with the prefix {prefix!r} has none, so its payloads "
            "would be stored as they are: give that one a codec, as in Tasks(codec=...)"
        )


def _decoded(codec: Codec, data: bytes, key_id: str | None) -> bytes:
    try:
        decoded: object = codec.decode(data, key_id)
    except Undecodable:
        raise
    except Exception as error:
        raise Undecodable(f"the codec {codec.name} raised {type(error).__name__}") from error
    if isinstance(decoded, bytes) and len(decoded) <= LIMITS.decoded:
        return decoded
    raise Undecodable(
        f"the codec {codec.name} returned {kind_of(decoded)}; expected at most {LIMITS.decoded} bytes (limit decoded)"
    )


def decoded_payload(encoding: Encoding | None, headers: Mapping[str, str], payload: bytes) -> bytes:
    """Return the plain payload of a task with these headers. Raises `Undecodable`."""
    header = headers.get(CODEC_HEADER)
    if header is None:
        return payload
    encoding = _demanded(encoding, header)
    try:
        if payload.lstrip()[:1] == b'"':
            return encoding.decoded(header, _text.decode(payload))
        added = _members.decode(payload)
        plain = encoding.decoded(header, _text.decode(added.pop(_ENCODED, b"null")))
        members = _members.decode(plain)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Undecodable(
            f"it has the header {CODEC_HEADER} ({shown(header)}), but its payload is no encoded text"
        ) from None
    if repeated := members.keys() & added.keys():
        raise Undecodable(f"{len(repeated)} of its arguments are both encoded and plain")
    return msgspec.json.encode(members | added)


def decoded_result(encoding: Encoding | None, text: bytes) -> bytes:
    """Return a plain result. What is not encoded stays as it is. Raises `Undecodable`."""
    if not text.startswith(_MARKED_RESULT):
        return text
    try:
        header, _, data = _text.decode(text)[len(_MARK) :].partition(" ")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Undecodable("it is damaged: it is not a JSON string") from None
    return _demanded(encoding, header).decoded(header, data)


def readable_error(encoding: Encoding | None, text: str) -> str:
    """Return the text of an error with the decoded message, or with what encoded it if it cannot be decoded."""

    def plain(found: re.Match[str]) -> str:
        header, data = found.groups()
        try:
            return _demanded(encoding, header).decoded(header, data).decode("utf-8", "replace")
        except Undecodable:
            return f"encoded ({shown(header)})"

    return _MARKED_TEXT.sub(plain, text) if _MARK in text else text


def shown(header: str) -> str:
    """Return the value of `CODEC_HEADER` for people: ``zlib, fernet, key 2026-11``."""
    return _OTHER.sub("?", header[:_MOST_NAME]).replace("+", ", ").replace(":", ", key ")


def _demanded(encoding: Encoding | None, header: str) -> Encoding:
    if encoding is None:
        raise Undecodable(
            f"it is encoded ({shown(header)}), and the registry has no codec: write Tasks(codec=...)"
        )
    return encoding


def shown_in_place(text: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """Return what people see instead of a result, or a payload with these headers; ``None`` if it is not encoded."""
    header = headers.get(CODEC_HEADER)
    if header is None and text.startswith(_MARKED_RESULT):
        header = text[len(_MARKED_RESULT) :].partition(b" ")[0].decode("ascii", "replace")
    return None if header is None else f"encoded ({shown(header)})"
