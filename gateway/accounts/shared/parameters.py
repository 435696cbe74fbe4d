"""Parameters that several routes of the management API share."""

import re
from typing import Annotated, Any, Final

from fastapi import Path, Query
from pydantic import BeforeValidator

MAX_TEXT_CHARACTERS: Final = 300
MAX_PAGE: Final = 100
MAX_CURSOR_CHARACTERS: Final = 4096

PRINTABLE: Final = r"^[^\x00-\x1f\x7f]+$"
"""Text without control characters: PostgreSQL rejects a comparison with NUL."""


def _plain(value: Any) -> Any:
    if isinstance(value, str) and not _INTEGER.fullmatch(value):
        raise ValueError("must be an integer in plain digits")
    return value


PLAIN: Final = BeforeValidator(_plain)
"""Refuses what pydantic reads as an integer too, such as ` 1`, `1.0` and `1_0`."""
FLAG: Final = BeforeValidator(lambda value: {"true": True, "false": False}.get(value, value))
"""Takes `true` and `false` in a query, before a strict boolean."""
_INTEGER: Final = re.compile(r"-?[0-9]{1,20}")

AnyName = Annotated[
    str,
    Path(
        max_length=MAX_TEXT_CHARACTERS,
        pattern=PRINTABLE,
        description="Name of the alias or model; may contain slashes.",
    ),
]
TenantId = Annotated[str, Path(description="Id of the tenant.")]
PageSize = Annotated[
    int, Query(ge=1, le=MAX_PAGE, description="Maximum entries of one page."), PLAIN
]

AfterId = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=MAX_TEXT_CHARACTERS,
        description="`id` of the last entry of the previous page; absent: the first page.",
    ),
]


def text_filter(description: str) -> object:
    """Return the declaration of an optional text parameter of the query."""
    return Query(
        min_length=1, max_length=MAX_TEXT_CHARACTERS, pattern=PRINTABLE, description=description
    )
