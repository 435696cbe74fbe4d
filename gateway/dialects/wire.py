"""Parse JSON bodies: limited depth, no NaN, and one clear error message per invalid parameter."""

import json
import re
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic_core import ErrorDetails

from gateway.records.errors import (
    MAX_SHOWN_CHARACTERS,
    ApiError,
    InvalidJsonError,
    InvalidParameterError,
    MissingParameterError,
    PayloadTooLargeError,
    invalid,
    shown,
)

MAX_DEPTH = 64
"""Maximum nesting of objects and arrays in a body."""

MAX_PARAMETERS = 256
"""Maximum parameters of a body, including unknown ones."""

MAX_NAME_CHARACTERS: Final = 256
"""Maximum characters of the name of a parameter: the names of those without effect are returned."""

MAX_MEMBERS: Final = 65_536
"""Maximum arrays, objects and object members in a body: each costs more than a listed number.

Bodies for models with long context windows may have more (`gateway.http.body`)."""

COUNTED_BYTES: Final = 16_384
"""Bytes of a body that are counted at a time, in under a millisecond."""

SLICE_BYTES: Final = 65_536
"""Bytes of a body that are decoded at a time: the decoder blocks all other threads."""

_TEXT_BYTES: Final = 524_288
"""The same for a body that is mostly text, such as a long chat: slices take four times as long."""
_FEW_CONTAINERS: Final = 16_384
"""Arrays and objects of such a body, including brackets in its texts."""

Model = TypeVar("Model", bound=BaseModel)

_decode = msgspec.json.Decoder().decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_LONGEST_START: Final = 64
_LONG_ITEMS: Final = re.compile(rb'\[\s*["\[{]')
_SLICED_LEVELS: Final = 8
"""Levels of nested containers that are sliced. Text in message parts is at the fifth."""
_HIGH_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB]")
_SURROGATES: Final = re.compile(
    rb"(\\+)u([dD][89a-fA-F][0-9a-fA-F]{2})(?:\\u([dD][c-fC-F][0-9a-fA-F]{2}))?"
    rb"|\xed[\xa0-\xbf][\x80-\xbf]"
)
"""Halves of characters outside the basic plane, alone or in pairs: escapes, or in UTF-8."""
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}".encode()
_CHARACTER_BYTES: Final = 4
"""Length of the longest character in UTF-8."""
_CONTINUATION_BYTES: Final = bytes(range(0x80, 0xC0))
_FIRST_BYTES: Final = bytes(range(0xC0, 0x100))
_ESCAPE_BYTES: Final = 6
"""Length of the longest escape. Two escapes form one character outside the basic plane."""


def _integral(value: object) -> object:
    """Convert 5.0 to 5, as in JSON Schema; some clients have only one number type."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


INTEGRAL = BeforeValidator(_integral)
"""Must be the last annotation of an `int`, after its bounds, so that OpenAPI shows them."""


class WrittenObject(dict[str, Any]):
    """A JSON object with its `text`, in which a prompt repeats it as someone wrote it."""

    __slots__ = ("text",)

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text


def written_object(values: dict[str, Any], text: str) -> dict[str, Any]:
    """Return an object with its text, unless chat templates write that text anyway."""
    is_usual = json.dumps(values, ensure_ascii=False) == text
    return values if is_usual else WrittenObject(values, text)


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in `body`. Raise InvalidJsonError for anything else."""
    brackets = body.count(b"[") + body.count(b"{")
    most_bytes = SLICE_BYTES if brackets > _FEW_CONTAINERS else _TEXT_BYTES
    try:
        value = _decode(body) if len(body) <= most_bytes else _decode_in_slices(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # Clients cut texts within a character. Few do, so only what is invalid is searched.
        whole = _SURROGATES.sub(_without_halves, body)
        if whole != body:
            return parse_object(whole)
        raise InvalidJsonError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidJsonError(f"The body must be a JSON object. Given: {shown(value)}.")
    # Most bodies have fewer opening brackets than the limit, so no walk is necessary.
    if brackets > MAX_DEPTH:
        _check_depth(value)
    return value


@dataclass(eq=False)
class StructureMeter:
    """Counts the structural characters of a JSON text while it arrives, before it is parsed.

    Characters in strings do not count. The counts of invalid JSON may be wrong after its first
    error.
    """

    _: KW_ONLY
    most_items: int
    """Maximum array and object items."""
    most_members: int = MAX_MEMBERS
    """Maximum containers and members."""
    text: bytearray = field(default_factory=bytearray)
    """The received bytes."""
    _items: int = 0
    _members: int = 0
    _counted_bytes: int = 0
    _uncounted_items: int = 0
    _uncounted_members: int = 0
    _is_in_string: bool = False
    _is_torn: bool = False
    """Whether the counted text ends in a backslash that still lacks its character."""

    def feed(self, part: bytes) -> None:
        """Add a part of the text."""
        self.text += part
        self._uncounted_items += _items(part)
        self._uncounted_members += _members(part)

    @property
    def is_in_doubt(self) -> bool:
        """Whether the text would exceed a limit if no structural character were in a string."""
        return (
            self._items + self._uncounted_items >= self.most_items
            or self._members + self._uncounted_members > self.most_members
        ) and self._counted_bytes < len(self.text)

    def count(self) -> None:
        """Count the next COUNTED_BYTES exactly. Raises PayloadTooLargeError above a limit."""
        text = bytes(self.text[self._counted_bytes : self._counted_bytes + COUNTED_BYTES])
        self._counted_bytes += len(text)
        self._uncounted_items -= _items(text)
        self._uncounted_members -= _members(text)
        if self._is_torn:
            text = b"\\" + text
        escapes = len(text) - len(text.rstrip(b"\\"))
        self._is_torn = escapes % 2 == 1
        plain = (text[:-1] if self._is_torn else text).replace(rb"\\", b"").replace(rb"\"", b"")
        parts = plain.split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        if len(parts) % 2 == 0:
            self._is_in_string = not self._is_in_string
        self._items += _items(outside)
        self._members += _members(outside)
        if self._items >= self.most_items:
            raise PayloadTooLargeError(
                f"The body must have at most {self.most_items} items in its arrays and objects. "
                f"Given: at least {self._items + 1}."
            )
        if self._members > self.most_members:
            raise PayloadTooLargeError(
                f"The body must have at most {self.most_members} arrays, objects and members of "
                f"objects. Given: at least {self._members}."
            )


def _decode_in_slices(body: bytes | bytearray) -> Any:
    """Decode a large text in slices, so that other threads can run in between.

    Raises msgspec.DecodeError.
    """
    try:
        return _sliced(memoryview(body), 0)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # This call reports the position of the error in the body.
        return _decode(body)


def _sliced(text: memoryview, level: int) -> Any:
    if len(text) <= SLICE_BYTES or level == _SLICED_LEVELS:
        return _decode(text)
    start = bytes(text[:_LONGEST_START])
    if start.startswith(b'"'):
        return _sliced_string(text)
    if start.startswith(b"{"):
        members = _decode_members(text).items()
        return {name: _sliced(memoryview(value), level + 1) for name, value in members}
    if _LONG_ITEMS.match(start):
        return [_sliced(memoryview(item), level + 1) for item in _decode_items(text)]
    return _decode(text)


def _sliced_string(text: memoryview) -> str:
    parts: list[str] = []
    start, end = 1, len(text) - 1
    while start < end:
        some = bytes(text[start : min(start + SLICE_BYTES, end)])
        if start + len(some) < end:
            some = some[: _whole_characters(some)]
        parts.append(_decode(b'"%b"' % some))
        start += len(some)
    return "".join(parts)


def _whole_characters(text: bytes) -> int:
    """Return how many bytes of a string to decode alone, with no escape or character split."""
    at = text.rfind(b"\\", len(text) - 2 * _ESCAPE_BYTES)
    if at < 0:
        # The last character may be incomplete, unless it is ASCII.
        last = text[-_CHARACTER_BYTES:]
        kept = last.rstrip(_CONTINUATION_BYTES).rstrip(_FIRST_BYTES)
        return len(text) - len(last) + len(kept)
    if not _begins_escape(text, at):
        return at + 1
    before = at - _ESCAPE_BYTES
    is_pair = _HIGH_SURROGATE.match(text, before) is not None and _begins_escape(text, before)
    return before if is_pair else at


def _without_halves(found: re.Match[bytes]) -> bytes:
    """Return what was found with U+FFFD for each half that lacks its other half."""
    escapes, first, second = found.groups()
    if escapes is None:
        return _REPLACEMENT
    is_escape = len(escapes) % 2 == 1
    if is_escape and second and first[1:2] in b"89abAB":
        return found[0]
    start = escapes[:-1] + _REPLACEMENT if is_escape else escapes + b"u" + first
    return start + _REPLACEMENT * bool(second)


def _begins_escape(text: bytes, at: int) -> bool:
    """Whether a backslash is not escaped itself."""
    return (at - len(text[:at].rstrip(b"\\"))) % 2 == 0


def _items(text: bytes) -> int:
    return text.count(b",")


def _members(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")


def validate(model: type[Model], value: dict[str, Any]) -> Model:
    """Validate `value` with `model`; null means absent. Raise for the first invalid parameter."""
    if len(value) > MAX_PARAMETERS:
        raise InvalidParameterError(
            f"The body must have at most {MAX_PARAMETERS} parameters. Given: {len(value)}."
        )
    for name in value:
        if len(name) > MAX_NAME_CHARACTERS:
            raise InvalidParameterError(
                f"Names of parameters must have at most {MAX_NAME_CHARACTERS} characters. "
                f"Given: {shown(name)} ({len(name)} characters).",
                param=name[:MAX_SHOWN_CHARACTERS],
            )
    present = {name: item for name, item in value.items() if item is not None}
    try:
        return model.model_validate(present)
    except ValidationError as error:
        raise _parameter_error(error.errors(include_url=False)[0]) from None


def _check_depth(value: object) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidJsonError:
    return InvalidJsonError(f"The body must be nested at most {MAX_DEPTH} levels deep.")


_EXPECTATIONS = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of at most 64 bits",
    "list_type": "an array",
    "model_type": "an object",
    "string_type": "a string",
    "string_too_long": "a string of at most {max_length} characters",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "enum": "one of {expected}",
    "literal_error": "one of {expected}",
}
"""What a value must be, by pydantic's types of errors."""


def _parameter_error(error: ErrorDetails) -> ApiError:
    # The keys of an object come from the client and may have any length.
    path = ".".join(str(part)[:MAX_SHOWN_CHARACTERS] for part in error["loc"]) or "body"
    kind, context, value = error["type"], error.get("ctx", {}), shown(error["input"])
    if kind == "missing":
        return MissingParameterError(path)
    if kind in _EXPECTATIONS:
        expected = _EXPECTATIONS[kind].format(**context)
        return invalid(path, f"must be {expected}. Given: {value}.")
    if kind == "value_error":
        return invalid(path, f"{context['error']}. Given: {value}.")
    return InvalidParameterError(f"'{path}': {error['msg']}. Given: {value}.", param=path)
