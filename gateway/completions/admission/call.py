"""Read a request of the generation API: its caller, body, model and dialect."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from fastapi import Request

from contract.tier import ServiceTier
from gateway.completions.admission.model_choice import Fallback, ModelChoice, Models
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
from gateway.records.errors import (
    ApiError,
    BadRequestError,
    ContextLengthExceededError,
    NotFoundError,
    OverloadedError,
    TenantQueueFullError,
    UnservedModelError,
    invalid,
    invalid_header,
)
from gateway.records.principal import Principal
from gateway.records.records import PromptLog
from gateway.records.scopes import Scope

RETENTION_HEADER: Final = "x-zero-retention"
"""`true`: nothing of this request is kept after its end, but its usage record."""
MOST_CHARACTERS: Final = 1024
"""Maximum characters of the name of a session or agent; the rest does not count."""

IDEMPOTENCY_HEADER: Final = "Idempotency-Key"

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
    fallbacks: tuple[Fallback, ...] = ()
    """What is tried in order if the chosen model cannot run the request."""
    is_kept: bool = True
    """Whether anything of the request may be kept after its end, besides its usage record."""

    @property
    def prompt_log(self) -> PromptLog | None:
        """How the request is logged; None if it is not. Lines of batches are in files."""
        return self.principal.prompt_log if self.is_kept and self.line is None else None

    @property
    def next(self) -> "Call | None":
        """The same request for the first of its fallbacks; None without one."""
        if not self.fallbacks:
            return None
        (name, choice), *rest = self.fallbacks
        body = self.body | {"model": name}
        return msgspec.structs.replace(self, choice=choice, body=body, fallbacks=tuple(rest))

    def require_model(self) -> None:
        """Raise a BadRequestError or the choice's refusal if the request cannot have its model."""
        require_model(self.body, self.profile)
        self.choice.require()


T = TypeVar("T")

_CANNOT_RUN: Final = (
    UnservedModelError,
    OverloadedError,
    TenantQueueFullError,
    ContextLengthExceededError,
)


async def with_fallbacks(call: Call, attempt: Callable[[Call], Awaitable[T]]) -> T:
    """Return the result of `attempt` for the first model of a request that can run it.

    A fallback that lacks what the request needs is passed over, too. Raises the error of the first
    model that is only unavailable for now, else of the first one.
    """
    errors, candidate = list[ApiError](), call
    try:
        while True:
            try:
                return await attempt(candidate)
            except _CANNOT_RUN as error:
                errors.append(error)
            except (BadRequestError, NotFoundError) as error:
                if not errors:
                    raise
                errors.append(error)
            if (following := candidate.next) is None:
                raise max(errors, key=lambda each: each.status)
            candidate = following
    finally:
        # An error refers to this frame: with the list, it would keep the body until a collection.
        errors.clear()


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
        takes_models: bool = False,
    ) -> Call:
        """Authorize the caller, read the body, and choose the dialect.

        Raises an ApiError.

        Unless it `is_paid`, the request counts as unpaid; a paid request counts as unpaid only if
        it fails. A request that `has_native_path` is in one of llama.cpp's dialects. The body of
        one that `takes_file` is a form; one that `takes_models` may name fallbacks. After this
        call, errors have the style of the client's dialect.
        """
        principal = await self._authorizer.authorize(request, Scope.COMPLETIONS, model_decides=True)
        self._unpaid.admit(exchange_of(request.scope), principal, is_paid=is_paid)
        if takes_file:
            body = await self._bodies.read_form(request, principal.tenant_id)
            beside = self._large_work.of(principal.tenant_id, size=len(body.get("file", b"")))
        else:
            content = await self._bodies.read_counted(request, principal.tenant_id)
            beside = self._large_work.of(principal.tenant_id, size=len(content))
            body = await beside(partial(parse_object, content))
        names = body.get("models") if takes_models else None
        if body.get("model") is None and isinstance(names, list) and names:
            body["model"] = names[0]
        call = await self._in_dialect(request, principal, body, beside)
        if takes_models and (call.choice.alias or body.get("models") is not None):
            fallbacks = await self._models.fallbacks(principal, body, call.choice)
            call = msgspec.structs.replace(call, fallbacks=fallbacks) if fallbacks else call
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
        is_kept = not _asks_for_zero_retention(request, principal)
        if not is_kept:
            _require_unkept(request, body)
        return Call(principal, profile, choice, body, beside, session, ignored, is_kept=is_kept)


def _asks_for_zero_retention(request: Request, principal: Principal) -> bool:
    given = request.headers.get(RETENTION_HEADER, "").lower()
    if given not in ("", "true", "false"):
        raise invalid_header(RETENTION_HEADER, "be true or false", given)
    if principal.zero_retention and given == "false":
        raise invalid_header(RETENTION_HEADER, "be true for this account, or absent", given)
    return principal.zero_retention or given == "true"


def _require_unkept(request: Request, body: dict[str, Any]) -> None:
    """Raise InvalidParameterError if a request with zero retention asks to keep something."""
    names = [name for name in ("background", "store") if body.get(name) is True]
    if IDEMPOTENCY_HEADER in request.headers:
        names.append(IDEMPOTENCY_HEADER)
    if names:
        raise invalid(names[0], "keeps the response, which zero retention does not allow.")


def require_native_paths(request: Request, profile: Profile) -> None:
    """Raise NotFoundError unless llama.cpp's own paths exist in a dialect."""
    if not profile.has_native_paths:
        raise NotFoundError(
            f"{route_hint(request)}"
            f"The route {request.method} {request.url.path} belongs to dialect llamacpp, but this "
            f"request is in dialect {profile.name}. Select llamacpp with the header "
            f"'{DIALECT_HEADER}', or as the dialect of the key, the tenant or the model."
        )
