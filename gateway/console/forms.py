"""Forms that pages send, within limits of size and time."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Self, TypeVar
from urllib.parse import parse_qs

from fastapi import Request
from pydantic import BaseModel, ValidationError
from typing_extensions import override

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
    shown,
)

Body = TypeVar("Body", bound=BaseModel)

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

    def to_show(self) -> Self:
        """Return the form with the same fields, for a page that shows it."""
        return type(self)(self._fields)

    def all(self, name: str) -> list[str]:
        """Return the values of a field that can be chosen several times."""
        return [value for value in self._fields.get(name, ()) if value]

    def confirmed(self, *names: str) -> dict[str, str]:
        """Return the fields of the form that confirms this one."""
        return {"confirmed": "yes", **{name: self[name] for name in names}}

    @property
    def is_confirmed(self) -> bool:
        """Whether the visitor has confirmed the form."""
        return self["confirmed"] == "yes"

    def words(self, name: str) -> list[str]:
        """Return the values of a field that separates them by commas, spaces or lines."""
        return self[name].replace(",", " ").split()


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


def number(text: str) -> int | float | str:
    """Return the number that a field has; any other text is for `checked` to refuse."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def concerns(error: ApiError | None, name: str) -> bool:
    """Whether a field of a form has the value that an error is about."""
    if error is None or error.param is None:
        return False
    parts = {part.removeprefix("allowed_") for part in error.param.split(".")}
    return name in parts or name.removeprefix("limit_") in parts


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
