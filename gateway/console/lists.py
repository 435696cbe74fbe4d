"""Pages of lists: which one a query asks for, and the link to the next one."""

from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Depends

from gateway.accounts.shared import AfterId
from gateway.platform.database.paging import Page, PageRequest

ROWS: Final = 50
"""Rows of one page."""


async def _newest(after: AfterId = None) -> PageRequest:
    return PageRequest(after, ROWS, is_newest_first=True)


Newest = Annotated[PageRequest, Depends(_newest)]
"""The page of a list that begins with the newest entry."""


def following(page: Page[Any], path: str, **query: str) -> str | None:
    """Return the link to the next page of a list, if there is one."""
    if not page.has_more:
        return None
    return f"{path}?{urlencode(query | {'after': page.entries[-1].id})}"
