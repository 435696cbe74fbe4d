"""Pages of lists: which one a query asks for, and where the next one starts."""

from typing import Annotated, Any, Final

from fastapi import Depends

from gateway.accounts.shared import AfterId
from gateway.platform.database.paging import Page, PageRequest

ROWS: Final = 50
"""Rows of one page."""


async def _newest(after: AfterId = None) -> PageRequest:
    return PageRequest(after, ROWS, is_newest_first=True)


Newest = Annotated[PageRequest, Depends(_newest)]
"""The page of a list that begins with the newest entry."""


def cursor_of(page: Page[Any]) -> str | None:
    """Return where the next page of a list starts, if there is one."""
    return page.entries[-1].id if page.has_more else None
