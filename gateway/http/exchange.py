"""What the gateway knows about a request while it serves it."""

from collections.abc import Collection, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.records.errors import ErrorStyle

_KEY: Final = "sluice.exchange"


@dataclass(slots=True)
class Exchange:
    """One request and its response."""

    tenant_id: str = ""
    """The tenant that pays for the event loop; empty before authentication."""
    cors_origins: Collection[str] = ()
    """Origins whose pages may read the response, besides those of the deployment."""
    error_style: ErrorStyle | None = None
    """The style of the request's dialect; None until the dialect is chosen."""
    caller: str = ""
    """The key that counts unpaid requests; empty if this request cannot count as one."""
    is_paid: bool = False
    """Whether a quota counts the request, unless it fails."""
    body_bytes: int = 0
    """Bytes of the body that have been read, and not counted as unpaid."""


def exchange_of(scope: MutableMapping[str, Any]) -> Exchange:
    """Return the exchange of an ASGI scope. The first use creates it."""
    exchange: Exchange | None = scope.get(_KEY)
    if exchange is None:
        exchange = scope[_KEY] = Exchange()
    return exchange
