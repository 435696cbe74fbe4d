"""Forms that pages send, within limits of size and time."""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import parse_qs

from fastapi import Request
from pydantic import BaseModel, ValidationError
from typing_extensions import override

from gateway.console.tables import Field
from gateway.http.body import require_utf8
from gateway.http.content_coding import content_coding
from gateway.http.services import services_of
from gateway.platform.settings import Settings
from gateway.records.errors import (
    ApiError,
    InvalidParameterError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
    must,
    shown,
)
from gateway.records.money import plain_dollars, read_dollars

Body = TypeVar("Body", bound=BaseModel)

CSRF_FIELD: Final = "csrf"
MAX_FORM_BYTES: Final = 64 * 1024
MAX_FIELDS: Final = 500
FORM_TYPE: Final = "application/x-www-form-urlencoded"


class Form(Mapping[str, str]):
    """The fields of a form; an empty or absent field is an empty string."""

    def __init__(
        self, fields: Mapping[str, Sequence[str]] | None = None, *, is_sent: bool = False
    ) -> None:
        self._fields = dict(fields or {})
        self.is_sent = is_sent
        """Whether to do what the form asks for; otherwise a page shows it."""

    @override
    def __getitem__(self, name: str) -> str:
        return self._fields.get(name, ("",))[0].strip()

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    @override
    def __len__(self) -> int:
        return len(self._fields)

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Self:
        """Return a form with one value for each field."""
        return cls({name: [value] for name, value in values.items()})

    @classmethod
    def of_request(cls, request: Request) -> "Form":
        """Return the form that a request has sent, which its route has read; empty for GET."""
        return getattr(request.state, "form", None) or Form()

    def to_show(self) -> Self:
        """Return the form with the same fields, for a page that shows it."""
        return type(self)(self._fields)

    def all(self, name: str) -> list[str]:
        """Return the values of a field that can be chosen several times."""
        return [value for value in self._fields.get(name, ()) if value]

    def confirmed(self) -> dict[str, str]:
        """Return the fields of the form that confirms this one, if it was sent."""
        if not self.is_sent:
            return {}
        own = (CSRF_FIELD, "confirmed")
        return {"confirmed": "yes"} | {name: self[name] for name in self if name not in own}

    @property
    def is_confirmed(self) -> bool:
        """Whether the visitor has confirmed the form."""
        return self["confirmed"] == "yes"

    def words(self, name: str) -> list[str]:
        """Return the values of a field that separates them by commas, spaces or lines."""
        return words(self[name])


async def read_form(request: Request) -> Form:
    """Return the form that a request contains.

    Raises PayloadTooLargeError, RequestTimeoutError or UnsupportedMediaTypeError.
    """
    media_type = request.headers.get("content-type", FORM_TYPE)
    if media_type.partition(";")[0].strip().lower() != FORM_TYPE:
        raise UnsupportedMediaTypeError(f"'Content-Type' must be {FORM_TYPE}.")
    require_utf8(media_type)
    content_coding(request.headers, known=())
    seconds = services_of(request)[Settings].body_timeout.total_seconds()
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                content += part
                if len(content) > MAX_FORM_BYTES:
                    raise PayloadTooLargeError(
                        f"The form must have at most {MAX_FORM_BYTES} bytes."
                    )
    except TimeoutError:
        raise RequestTimeoutError(f"The form did not arrive within {seconds:g} seconds.") from None
    try:
        fields = parse_qs(
            content.decode(),
            keep_blank_values=True,
            max_num_fields=MAX_FIELDS,
            strict_parsing=False,
        )
    except ValueError:
        raise InvalidParameterError(
            f"The form must be UTF-8 text with at most {MAX_FIELDS} fields.", param="form"
        ) from None
    return Form(fields, is_sent=True)


def words(text: str) -> list[str]:
    """Return the parts of a text between commas, spaces or lines."""
    return text.replace(",", " ").split()


def number(text: str) -> int | float | str:
    """Return the number that a field has; any other text is for `checked` to refuse."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


class _Kind(NamedTuple):
    read: Callable[[str], Any]
    """Returns what a text stands for; None if it breaks the rule."""
    show: Callable[[Any], str]
    empty: Any = None
    """What no text stands for."""
    rule: str = ""
    """What an error says that the text must be."""


def _dollars(text: str) -> int | None:
    micros = read_dollars(text)
    return None if micros is None or micros < 0 else micros


_TIME: Final = "%Y-%m-%dT%H:%M:%S"
_KINDS: Final[Mapping[str, _Kind]] = {
    "checkbox": _Kind(
        lambda text: text == "yes", lambda value: "yes" if value else "", empty=False
    ),
    "datetime-local": _Kind("{}Z".format, lambda value: value.strftime(_TIME)),
    "dollars": _Kind(
        _dollars,
        plain_dollars,
        rule="be an amount in dollars such as 12.50, with at most six decimals",
    ),
    "number": _Kind(number, "{:g}".format),
    "words": _Kind(words, lambda value: " ".join(map(str, value)), empty=()),
}
"""Fields by their types; of other types, the text is the value."""
_TEXT: Final = _Kind(str, str)


def values_of(fields: Iterable[Field], form: Form, *, is_new: bool = True) -> dict[str, Any]:
    """Return the values of a request body that fields of a form stand for.

    An empty field of something new is absent unless it is required, else it removes the value.
    Raises InvalidParameterError.
    """
    values: dict[str, Any] = {}
    for field in fields:
        kind = _KINDS.get(field.type, _TEXT)
        if (text := form[field.name] or field.default) or field.is_required:
            value = values[field.name] = kind.read(text)
            if value is None:
                raise must(field.name, kind.rule, text)
        elif not is_new:
            values[field.name] = kind.empty
    return values


def texts_of(fields: Iterable[Field], record: object, **others: str) -> dict[str, str]:
    """Return the texts with which fields of a form stand for values of a record, and the others."""
    texts = dict(others)
    for field in fields:
        if field.name not in others:
            value = getattr(record, field.name)
            texts[field.name] = "" if value is None else _KINDS.get(field.type, _TEXT).show(value)
    return texts


def concerns(error: ApiError | None, name: str) -> bool:
    """Whether a field of a form has the value that an error is about."""
    if error is None or error.param is None:
        return False
    parts = {part.removeprefix("allowed_") for part in error.param.split(".")}
    return name in parts or name.removeprefix("limit_") in parts


def named(error: ApiError, label: str) -> str:
    """Return the message of an error about a field, with the name that the page has for it."""
    whole = error.param or ""
    names = "|".join(re.escape(name) for name in (whole, whole.rpartition(".")[2]))
    return re.sub(f"'(?:{names})'", f"“{label}”", error.message)


def checked(body: type[Body], values: Mapping[str, Any]) -> Body:
    """Return the request body that a form stands for. Raises InvalidParameterError."""
    try:
        return body.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(map(str, problem["loc"]))
        reason = problem["msg"].removeprefix("Value error, ")
        raise InvalidParameterError(
            f"'{name}': {reason}. Given: {shown(problem.get('input'))}.", param=name
        ) from None
