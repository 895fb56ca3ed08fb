"""Results of handlers: encoding and decoding by the handlers' return annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import NoneType, UnionType
from typing import Any, Never, NoReturn, Union, cast, get_args, get_origin

from pydantic import PydanticUserError, ValidationError
from pydantic_core import PydanticSerializationError

from taskqueue_core.application.errors import InvalidResult
from taskqueue_core.application.json_codec import (
    NOT_FINITE,
    JsonCodec,
    bytes_fault,
    describe,
    is_finite,
)
from taskqueue_core.application.type_errors import annotation_error, handler_signature
from taskqueue_core.errors import InvalidInput, TooLarge
from taskqueue_core.json_text import encode_json, to_builtins
from taskqueue_core.limits import check_written, kind_of

_NO_VALUE = (None, NoneType, NoReturn, Never)


class Results:
    """An encoder and decoder for the results of one handler. It inspects the handler's return annotation once.

    `write` validates a result in pydantic's lax mode, as `Arguments` do, and encodes it; `read` decodes it. Exceptions
    in the annotation, such as ``Retry``, are no results. Without an annotation, or with ``Any`` or ``object``, a result
    is any value that has an exact equivalent in JSON; pydantic models are dumped. A batch handler returns a list of
    results, each of the type of the items.
    """

    def __init__(self, function: Callable[..., Any], *, batch: bool) -> None:
        """Inspect the annotation. Raises `ConfigurationError` if pydantic does not know the JSON form of the type."""
        annotation = handler_signature(function).return_annotation
        try:
            kind = _result_type(_item_type(annotation) if batch else annotation)
            self._codec = JsonCodec(kind)
        except (PydanticUserError, TypeError, NameError) as error:
            raise annotation_error(function, {None: annotation}, error) from error
        self._is_any = kind in (Any, object)
        self.optional = self._is_any or self._accepts_none()
        """whether ``None`` is a result"""

    def write(self, value: object, limit: str = "payload") -> bytes:
        """Encode a result as JSON text. ``limit``: the name of the limit on its size.

        Raises `InvalidResult` if it does not match the annotation, and `InvalidInput` if it has no equivalent in JSON.
        """
        fault: InvalidInput | InvalidResult
        try:
            if self._is_any:
                return encode_json("result", to_builtins(value), limit)
            codec = self._codec
            text = codec.serializer.to_json(codec.validator.validate_python(value), by_alias=True)
            check_written("result", text, limit)
        except ValidationError as error:
            fault = InvalidResult(
                f"the result does not match the return annotation: {describe(error, self._codec, 'result')}"
            )
        except PydanticSerializationError as error:
            fault = InvalidInput(
                "result",
                kind_of(value),
                bytes_fault(error) or "a value that has an equivalent in JSON",
            )
        except InvalidInput as error:
            fault = error
        else:
            return text
        raise _explained(value, fault) from None

    def read(self, text: bytes) -> Any:
        """Decode a result. Raises pydantic's ``ValidationError``."""
        return self._codec.validate_json(text)

    def _accepts_none(self) -> bool:
        try:
            self._codec.validator.validate_python(None)
        except ValidationError:
            return False
        return True


def _explained(value: object, error: InvalidInput | InvalidResult) -> InvalidInput | InvalidResult:
    """Return the error for a result, or one that says more about it."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # otherwise Python warns that it was never awaited
        return InvalidResult(
            f"the handler returned a {kind_of(value)} and no result: if a decorator made it from an async function, "
            "write 'async def' for the function that the decorator returns, and await the call in it; if not, write "
            "'async def' for the handler, and await what it returns"
        )
    if isinstance(error, InvalidInput) and not isinstance(error, TooLarge) and not is_finite(value):
        return InvalidInput(
            "result", NOT_FINITE, "finite numbers; return None or text in place of the others"
        )
    return error


def _result_type(annotation: Any) -> Any:
    """Return the type of the results: the annotation without exceptions, which are no results."""
    if annotation in _NO_VALUE or _is_error(annotation):
        return None
    if get_origin(annotation) not in (Union, UnionType):
        return Any if annotation is inspect.Signature.empty else annotation
    kinds = [each for each in get_args(annotation) if not _is_error(each)]
    return _union(kinds) if kinds else None


def _is_error(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _item_type(annotation: Any) -> Any:
    """Return the type of the results in a list that a batch handler returns; `Any` if it is not known."""
    if annotation in _NO_VALUE:
        return None
    if get_origin(annotation) in (Union, UnionType):
        return _union(_item_type(each) for each in get_args(annotation))
    if get_origin(annotation) in (list, tuple, Sequence):
        return get_args(annotation)[0]
    return Any


def _union(kinds: Iterable[Any]) -> Any:
    return cast("Any", Union)[tuple(kinds)]
