"""Codecs: how payloads, results and error texts are compressed and encrypted before they leave the application."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from taskqueue_core.application.errors import Undecodable
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import LIMITS, check_number, kind_of

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,50}")
_KEY_BYTES = 32
_PLAIN, _COMPRESSED = b"\x00", b"\x01"
_MOST_CODECS = 8


class Codec(Protocol):
    """A way to encode bytes, such as a compression or an encryption: ``Tasks(codec=...)``. Thread-safe.

    An application may write its own. What it encodes is decoded by a codec of the same name, maybe in another process
    and much later. The codec for a task is never chosen by what is stored with the task: an unknown name is refused.

    >>> import hashlib
    >>> class Reversed:
    ...     name = "reversed"
    ...     key_id = None
    ...
    ...     def encode(self, data: bytes) -> bytes:
    ...         return data[::-1]
    ...
    ...     def decode(self, data: bytes, key_id: str | None) -> bytes:
    ...         return data[::-1]
    ...
    ...     def digest(self, data: bytes) -> bytes:
    ...         return hashlib.sha256(data).digest()
    >>> tasks = Tasks(prefix="shop.", codec=Reversed())
    """

    @property
    def name(self) -> str:
        """The name under which the codec is stored with a task: 1 to 50 letters, digits, ``_``, ``.`` or ``-``."""

    @property
    def key_id(self) -> str | None:
        """The name of the key that `encode` uses, by the same rule; ``None`` for a codec without keys."""

    def encode(self, data: bytes) -> bytes:
        """Encode bytes."""

    def decode(self, data: bytes, key_id: str | None) -> bytes:
        """Decode bytes that were encoded with the key of this name.

        Raises `Undecodable` if the data is damaged, the key is not known, or the result has more than
        ``LIMITS.decoded`` bytes: allocate no more than that, because the data may come from anyone who can publish.
        """

    def digest(self, data: bytes) -> bytes:
        """Return 16 to 64 bytes that are the same for the same data, in every process with the same codec.

        With keys, a program without them cannot compute it.
        """


class Zlib:
    """Compresses data of more than ``above`` bytes with zlib.

    Raises `ConfigurationError` for a number that is not allowed.

    >>> tasks = Tasks(codec=Zlib(above=1024))
    """

    name = "zlib"
    key_id = None

    def __init__(self, above: int = 1024) -> None:
        """Store the option. Data that does not become smaller is stored as it is."""
        try:
            check_number("above", above, 0, LIMITS.decoded)
        except InvalidInput as error:
            raise ConfigurationError(f"Zlib: {error}") from None
        self._above = above

    def __repr__(self) -> str:
        return f"Zlib(above={self._above})"

    def encode(self, data: bytes) -> bytes:
        """Return one byte, which says whether the rest is compressed, and the rest."""
        if len(data) > self._above:
            packed = zlib.compress(data)
            if len(packed) < len(data):
                return _COMPRESSED + packed
        return _PLAIN + data

    def decode(self, data: bytes, key_id: str | None) -> bytes:  # noqa: ARG002 - it has no keys
        """Decompress data. Raises `Undecodable`; memory is bounded by ``LIMITS.decoded``."""
        if data[:1] == _PLAIN:
            return data[1:]
        if data[:1] != _COMPRESSED:
            raise Undecodable("the data is damaged: it was not written by this codec (zlib)")
        stream = zlib.decompressobj()
        try:
            decoded = stream.decompress(data[1:], LIMITS.decoded + 1)
        except zlib.error:
            raise Undecodable("the data is damaged: it cannot be decompressed (zlib)") from None
        if len(decoded) > LIMITS.decoded:
            raise Undecodable(
                f"it has more than {LIMITS.decoded} bytes after decompression (limit decoded)"
            )
        if not stream.eof or stream.unused_data:
            raise Undecodable("the data is damaged: it does not end where it should (zlib)")
        return decoded

    def digest(self, data: bytes) -> bytes:
        """Return the SHA-256 of data."""
        return hashlib.sha256(data).digest()


class Fernet:
    """Encrypts data, with AES-128 and an HMAC, as the specification of Fernet says. Needs the extra ``crypto``.

    ``keys`` are made by ``cryptography.fernet.Fernet.generate_key()``: the first one encrypts, all of them decrypt. In
    a mapping, they have names, which are stored with the tasks; otherwise the name of a key is derived from it, and
    does not reveal it. To change the key, first append the new one in all processes, then make it the first, and remove
    the old one when nothing that was encrypted with it is stored any more.

    ``digest_key`` is for digests of contents and for unique keys; by default it is the first key. Set it, and keep it,
    if repeated publishes and unique keys must be recognised across a change of the first key.

    Raises `ConfigurationError` if a key is wrong. Errors and ``repr`` never show keys.

    >>> tasks = Tasks(codec=CodecChain(Zlib(), Fernet(keys={"2026-11": new_key, "2026-10": old_key})))
    """

    name = "fernet"

    def __init__(
        self,
        keys: Mapping[str, bytes | str] | Sequence[bytes | str],
        *,
        digest_key: bytes | str | None = None,
    ) -> None:
        """Check the keys, and import the library."""
        try:
            from cryptography.fernet import Fernet as Cipher  # noqa: PLC0415 - an extra
            from cryptography.fernet import InvalidToken  # noqa: PLC0415 - as above
        except ImportError as error:
            raise ConfigurationError(
                "Fernet needs the library cryptography: install the extra 'crypto', as in "
                "pip install 'taskqueue-backends[crypto]'"
            ) from error
        named = _named_keys(keys)
        self._invalid = InvalidToken
        self._ciphers = {
            name: Cipher(base64.urlsafe_b64encode(secret)) for name, secret in named.items()
        }
        self.key_id: str = next(iter(named))
        """name of the key that encrypts"""
        secret = named[self.key_id] if digest_key is None else _secret("digest_key", digest_key)
        self._digest_key = _derived(secret, b"content digest")

    def __repr__(self) -> str:
        return f"Fernet(keys: {', '.join(self._ciphers)})"

    def encode(self, data: bytes) -> bytes:
        """Encrypt data with the first key."""
        return base64.urlsafe_b64decode(self._ciphers[self.key_id].encrypt(data))

    def decode(self, data: bytes, key_id: str | None) -> bytes:
        """Decrypt data. Raises `Undecodable`."""
        cipher = self._ciphers.get(key_id or "")
        if cipher is None:
            raise Undecodable(
                f"its key {key_id!r} is not among the keys {', '.join(self._ciphers)} of this process (fernet)"
            )
        try:
            return cipher.decrypt(base64.urlsafe_b64encode(data))
        except self._invalid:
            raise Undecodable(
                f"the data is damaged, or encrypted with another key than {key_id!r} of this process (fernet)"
            ) from None

    def digest(self, data: bytes) -> bytes:
        """Return an HMAC-SHA256 of data."""
        return hmac.digest(self._digest_key, data, "sha256")


class CodecChain:
    """Several codecs, which encode in this order and decode in the opposite one. Compress before you encrypt.

    Each of them has another name. What was encoded with some of them only can be decoded, too, so one can be added
    while tasks are in the queues. Raises `ConfigurationError`.

    >>> tasks = Tasks(codec=CodecChain(Zlib(above=1024), Fernet(keys=[new_key, old_key])))
    """

    def __init__(self, *codecs: Codec | CodecChain) -> None:
        """Check the codecs."""
        self.codecs: tuple[Codec, ...] = tuple(
            each
            for codec in codecs
            for each in (codec.codecs if isinstance(codec, CodecChain) else (codec,))
        )
        """the codecs, in the order in which they encode"""
        if not 0 < len(self.codecs) <= _MOST_CODECS:
            raise ConfigurationError(
                f"CodecChain: got {len(self.codecs)} codecs; expected 1 to {_MOST_CODECS}"
            )
        for codec in self.codecs:
            check_codec(codec)
        names = [codec.name for codec in self.codecs]
        if len({*names}) < len(names):
            raise ConfigurationError(
                f"CodecChain: two codecs have the same name; the names are {', '.join(names)}"
            )

    def __repr__(self) -> str:
        return f"CodecChain({', '.join(map(repr, self.codecs))})"


AnyCodec: TypeAlias = Codec | CodecChain


def check_codec(codec: object) -> None:
    """Raise `ConfigurationError` if an object is no `Codec`."""
    methods = ("encode", "decode", "digest")
    if isinstance(codec, type) or not all(callable(getattr(codec, each, None)) for each in methods):
        kind = codec.__name__ if isinstance(codec, type) else type(codec).__name__
        raise ConfigurationError(
            f"codec: got {kind}; expected an object with the methods encode, decode and digest, such as Zlib()"
        )
    name, key_id = getattr(codec, "name", None), getattr(codec, "key_id", None)
    for what, text in (("name", name), ("key_id", name if key_id is None else key_id)):
        if not isinstance(text, str) or not _NAME.fullmatch(text):
            raise ConfigurationError(
                f"codec {type(codec).__name__}: its {what} is {kind_of(text)}; expected 1 to 50 characters of A-Z a-z "
                "0-9 _ . -"
            )


def _named_keys(keys: object) -> dict[str, bytes]:
    """Return the decoded keys by their names."""
    if isinstance(keys, Mapping):
        for name in keys:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ConfigurationError(
                    f"Fernet: a name of a key is {kind_of(name)}; expected 1 to 50 characters of A-Z a-z 0-9 _ . -"
                )
        named = {name: _secret(f"keys[{name!r}]", key) for name, key in keys.items()}
    elif isinstance(keys, Sequence) and not isinstance(keys, str | bytes):
        secrets = [_secret(f"keys[{number}]", key) for number, key in enumerate(keys)]
        named = {_derived(each, b"key id")[:4].hex(): each for each in secrets}
        if len(named) < len({*secrets}):
            raise ConfigurationError(
                "Fernet: keys: two keys have the same derived name: name them with a dict"
            )
    else:
        raise ConfigurationError(
            f"Fernet: keys: got {kind_of(keys)}; expected a list of keys, or a dict of keys by name"
        )
    if not named:
        raise ConfigurationError("Fernet: keys: there is no key; expected at least one")
    return named


def _secret(field: str, key: object) -> bytes:
    """Return the bytes of a key. The error does not show it."""
    try:
        secret = base64.urlsafe_b64decode(key) if isinstance(key, str | bytes) else b""
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) != _KEY_BYTES:
        raise ConfigurationError(
            f"Fernet: {field}: got {kind_of(key)}; expected the result of "
            "cryptography.fernet.Fernet.generate_key(), which is 32 bytes as URL-safe base64"
        ) from None
    return secret


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return hmac.digest(secret, b"taskqueue " + purpose, "sha256")
