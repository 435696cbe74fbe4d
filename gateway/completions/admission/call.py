"""Read a request of the generation API: its caller, body, model and dialect."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from fastapi import Request

from contract.tier import ServiceTier
from gateway.completions.admission.model_choice import ModelChoice, Models
from gateway.dialects.bodies import require_model
from gateway.dialects.profile import Profile
from gateway.dialects.profile_choice import DIALECT_HEADER
from gateway.dialects.wire import parse_object
from gateway.http.allowances import UnpaidRequests
from gateway.http.authorization import Authorizer, require_header_of
from gateway.http.body import BodyReader
from gateway.http.error_handlers import route_hint
from gateway.http.exchange import exchange_of
from gateway.http.query import ignored_query
from gateway.platform.concurrency.large_work import Beside, LargeWork
from gateway.records.errors import NotFoundError
from gateway.records.principal import Principal
from gateway.records.scopes import Scope

MOST_CHARACTERS: Final = 1024
"""Maximum characters of the name of a session or agent; the rest does not count."""

_FIRST: Final = (b"x-session-affinity", b"x-claude-code-session-id")
_LATER: Final = (b"session_id", b"session-id", b"conversation_id", b"conversation-id")
"""Before and after `prompt_cache_key` of the body."""
_IN_BODY: Final = frozenset({"prompt_cache_key", "session_id", "metadata"})
_AGENT: Final = (b"x-claude-code-agent-id", b"x-openai-subagent")
_PARENT: Final = (b"x-claude-code-parent-agent-id",)
_NAMES: Final = frozenset((*_FIRST, *_LATER, *_AGENT, *_PARENT))


class Session(NamedTuple):
    """The session of a request, as its client names it; empty texts if it does not.

    Each request of an agent's session finds the work of the one before.
    """

    id: str = ""
    agent: str = ""
    """The agent of the session, if it has several."""
    parent_agent: str = ""

    @property
    def key(self) -> str:
        """Equal for requests of one agent in one session; empty without a session."""
        return self.id and f"{self.id} {self.agent}"


_NO_SESSION: Final = Session()


def session_of(request: Request, body: dict[str, Any]) -> Session:
    """Return the session that headers or the body name. Values of other types do not count."""
    # One pass: most requests name no session.
    found = {name: value.decode("latin-1") for name, value in request.headers.raw if name in _NAMES}
    if not found and _IN_BODY.isdisjoint(body):
        return _NO_SESSION
    metadata = body.get("metadata")
    session = _first(
        *map(found.get, _FIRST),
        body.get("prompt_cache_key"),
        *map(found.get, _LATER),
        body.get("session_id"),
        metadata.get("user_id") if isinstance(metadata, dict) else None,
    )
    return Session(session, _first(*map(found.get, _AGENT)), _first(*map(found.get, _PARENT)))


def _first(*names: Any) -> str:
    return next((e[:MOST_CHARACTERS] for e in names if isinstance(e, str) and e), "")


class BatchLine(msgspec.Struct, frozen=True):
    """What distinguishes a line of a batch from a request over HTTP."""

    id: str
    """Batch and line number."""
    request_id: str
    """Id of its response and its usage record, however often it runs."""
    deadline_ms: int
    """Unix time at which its batch expires."""
    tier: ServiceTier
    """Its tier in the queue. It pays the price of batches in any tier."""


class Call(msgspec.Struct, frozen=True):
    """An authorized request to the generation API."""

    principal: Principal
    profile: Profile
    choice: ModelChoice
    body: dict[str, Any]
    beside: Beside
    """Runs work whose time grows with the size of the body."""
    session: Session = Session()
    ignored_query: tuple[str, ...] = ()
    """Parameters of the query, and `store`, if they have no effect."""
    line: BatchLine | None = None
    """Set for a line of a batch."""

    def require_model(self) -> None:
        """Raise a BadRequestError or the choice's refusal if the request cannot have its model."""
        require_model(self.body, self.profile)
        self.choice.require()


@dataclass(eq=False)
class RequestReader:
    """Reads requests: their callers, bodies, models and dialects."""

    _authorizer: Authorizer
    _unpaid: UnpaidRequests
    _bodies: BodyReader
    _large_work: LargeWork
    _models: Models

    @property
    def most_body_bytes(self) -> int:
        """The largest body that is read."""
        return self._bodies.limits.most_bytes

    async def read(
        self,
        request: Request,
        *,
        is_paid: bool = False,
        has_native_path: bool = False,
        takes_file: bool = False,
        authorized: Principal | None = None,
    ) -> Call:
        """Authorize the caller, unless it is `authorized`, read the body, and choose the dialect.

        Raises an ApiError.

        Unless it `is_paid`, the request counts as unpaid; a paid request counts as unpaid only if
        it fails. A request that `has_native_path` is in one of llama.cpp's dialects. The body of
        one that `takes_file` is a form. After this call, errors have the style of the client's
        dialect.
        """
        principal = authorized
        if principal is None:
            principal = await self._authorizer.authorize(
                request, Scope.COMPLETIONS, model_decides=True
            )
        else:
            principal.require_scope(Scope.COMPLETIONS)
        self._unpaid.admit(exchange_of(request.scope), principal, is_paid=is_paid)
        if takes_file:
            body = await self._bodies.read_form(request, principal.tenant_id)
            beside = self._large_work.of(principal.tenant_id, size=len(body.get("file", b"")))
        else:
            content = await self._bodies.read_counted(request, principal.tenant_id)
            beside = self._large_work.of(principal.tenant_id, size=len(content))
            body = await beside(partial(parse_object, content))
        call = await self._in_dialect(request, principal, body, beside)
        if authorized is None:
            require_header_of(request, call.profile)
        if has_native_path:
            require_native_paths(request, call.profile)
        return call

    async def read_query(
        self, request: Request, body: dict[str, Any], *, has_native_path: bool = False
    ) -> Call:
        """Like `read`, for GET requests whose parameters are in the query, read as `body`.

        The request counts as unpaid, unless it `has_native_path`. Raises an ApiError.
        """
        principal = await self._authorizer.authorize(
            request, Scope.COMPLETIONS, model_decides=has_native_path
        )
        if not has_native_path:
            self._unpaid.admit(exchange_of(request.scope), principal)
        beside = self._large_work.of(principal.tenant_id, size=0)
        call = await self._in_dialect(request, principal, body, beside)
        require_header_of(request, call.profile)
        if has_native_path:
            require_native_paths(request, call.profile)
        return call

    async def _in_dialect(
        self, request: Request, principal: Principal, body: dict[str, Any], beside: Beside
    ) -> Call:
        header = request.headers.get(DIALECT_HEADER)
        choice, profile = await self._models.choose(principal, body, header=header)
        exchange = exchange_of(request.scope)
        exchange.error_style = exchange.error_style or profile.error_style
        session, ignored = session_of(request, body), ignored_query(request)
        return Call(principal, profile, choice, body, beside, session, ignored)


def require_native_paths(request: Request, profile: Profile) -> None:
    """Raise NotFoundError unless llama.cpp's own paths exist in a dialect."""
    if not profile.has_native_paths:
        raise NotFoundError(
            f"{route_hint(request)}"
            f"The route {request.method} {request.url.path} belongs to dialect llamacpp, but this "
            f"request is in dialect {profile.name}. Select llamacpp with the header "
            f"'{DIALECT_HEADER}', or as the dialect of the key, the tenant or the model."
        )
