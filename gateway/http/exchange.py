"""What the gateway knows about a request while it serves it."""

from collections.abc import Collection, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.dialects.endpoint import ANTHROPIC_PREFIX, MESSAGES
from gateway.records.errors import ErrorStyle
from gateway.records.principal import Principal

_ANTHROPIC_PATHS: Final = (MESSAGES.path, f"{ANTHROPIC_PREFIX}/")
_MODELS_PATH: Final = "/v1/models"
VERSION_HEADER: Final = "anthropic-version"
"""A header that only Anthropic's clients send."""

_VERSION: Final = VERSION_HEADER.encode()
_KEY: Final = "sluice.exchange"


@dataclass(slots=True)
class Exchange:
    """One request and its response."""

    tenant_id: str = ""
    """The tenant that pays for the event loop; empty before authentication."""
    credential_id: str = ""
    """The credential that sends the request, likewise."""
    project_id: str | None = None
    session: Principal | None = None
    """Who sends the request, if a session of the console is its credential."""
    cors_origins: Collection[str] = ()
    """Origins whose pages may read the response, besides those of the deployment."""
    error_style: ErrorStyle | None = None
    """The style of the request's path, or else of its dialect; None until that is chosen."""
    stream_model: str | None = None
    """The model that a stream of Responses requests: some errors become its events."""
    caller: str = ""
    """The key that counts unpaid requests; empty if this request cannot count as one."""
    is_paid: bool = False
    """Whether a quota counts the request, unless it fails."""
    body_bytes: int = 0
    """Bytes of the body that have been read, and not counted as unpaid."""

    def sent_by(self, principal: Principal) -> None:
        """Set whose request it is."""
        self.tenant_id, self.project_id = principal.tenant_id, principal.project_id
        self.credential_id = principal.credential_id


def exchange_of(scope: MutableMapping[str, Any]) -> Exchange:
    """Return the exchange of an ASGI scope. The first use creates it."""
    exchange: Exchange | None = scope.get(_KEY)
    if exchange is None:
        style = ErrorStyle.ANTHROPIC if is_anthropic(scope) else None
        exchange = scope[_KEY] = Exchange(error_style=style)
    return exchange


def anthropic_id(request_id: str) -> str:
    """Return the `request-id` of Anthropic's API for the `x-request-id` of a request."""
    return request_id if request_id.startswith("req_") else f"req_{request_id}"


def is_anthropic(scope: MutableMapping[str, Any]) -> bool:
    """Return whether an ASGI scope is of a request to Anthropic's API."""
    path: str = scope["path"]
    if not path.startswith(_MODELS_PATH):
        return path.startswith(_ANTHROPIC_PATHS)
    return any(name == _VERSION for name, _ in scope["headers"])
