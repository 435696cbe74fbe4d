"""Routes of the console: who is logged in, protection of forms, and errors as pages."""

import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec
from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from typing_extensions import override

from gateway.accounts.tenants.service import TenantService
from gateway.auth.authenticator import Authenticator
from gateway.auth.oidc import OidcProvider
from gateway.auth.sessions import Audience, KeyLogin, PersonLogin, Session, Sessions
from gateway.console.forms import CSRF_FIELD, read_form
from gateway.console.rendering import SECURITY_HEADERS, page
from gateway.console.visitor import TENANT_PAGES, Visitor
from gateway.http.error_handlers import on_exception
from gateway.http.exchange import exchange_of
from gateway.http.services import Services, services_of
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.settings import Settings
from gateway.records.errors import (
    ApiError,
    AuthenticationError,
    ErrorStyle,
    InvalidParameterError,
    NotFoundError,
    PermissionDeniedError,
    StoreUnavailableError,
    queue_unavailable,
    shown,
)
from gateway.records.principal import Principal
from gateway.records.records import Tenant
from gateway.records.scopes import OPERATOR_SCOPES, TENANT_SCOPES, Scope

LOGIN: Final = "/console/login"
ACCOUNTS: Final = "/console/accounts"
CSRF_HEADER: Final = "x-csrf-token"
KEPT: Final = "shown"
"""Parameter of a query: the number of a page that is the response to a form."""
DRAFT: Final = "draft"
"""Parameter of a query: whether the browser fills in what was sent without a session."""
FORM: Final = ["GET", "POST"]
"""Methods of a page with a form. If the form has an error, the page shows both again."""
_PLAIN_HOST: Final = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
_SCOPES: Final = {Audience.CUSTOMERS: TENANT_SCOPES, Audience.OPERATORS: OPERATOR_SCOPES}
"""Scopes of which a credential needs one to log in."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class PageRoute(APIRoute):
    """A route whose errors are pages. Each response has the security headers."""

    @override
    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_page(request: Request) -> Response:
            try:
                response = await self.admitted(request, handle)
            except (ApiError, HTTPException, RequestValidationError, RedisError) as error:
                wants_json = request.headers.get("accept", "").startswith("application/json")
                if wants_json:
                    response = await on_exception(request, error)
                else:
                    response = error_page(request, error)
            for name, value in SECURITY_HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return handle_page

    async def admitted(self, request: Request, handle: Handler) -> Response:
        """Handle a request that may proceed. Raises PermissionDeniedError for a foreign form."""
        if request.method not in _SAFE_METHODS:
            require_same_origin(request)
        return await handle(request)


class _KeptPage(msgspec.Struct, frozen=True):
    """The response to a form."""

    path: str
    csrf: str
    """The token of the session then; a session of another account has another one."""
    status: int
    policy: str
    content: bytes


class _SessionRoute(PageRoute):
    """A route for those who are logged in; without a session it redirects to the login page."""

    audience: Audience
    needs_rights: ClassVar[bool] = True
    """Whether the page needs a credential with rights; otherwise only a session."""
    reads_form: ClassVar[bool] = True
    """Whether forms with files are refused, so that no page has to check their tokens."""
    keeps_answers: ClassVar[bool] = True
    """Whether the browser gets the response to a form by GET, so that it can be loaded again."""

    @override
    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_form(request: Request) -> Response:
            return await self._to_load_again(request, await handle(request))

        return handle_form

    @override
    async def admitted(self, request: Request, handle: Handler) -> Response:
        is_safe = request.method in _SAFE_METHODS
        if not is_safe:
            require_same_origin(request)
        session = await _find_session(request, self.audience)
        if session is None:
            return self._to_login(request)
        request.state.session = session
        visitor = None
        if self.needs_rights:
            if _lacks_account(session):
                return redirect(ACCOUNTS)
            try:
                visitor = await self._visitor(request, session)
            except AuthenticationError:
                return self._to_login(request)
        if not is_safe:
            if self.reads_form or not _has_file(request):
                await _require_token(request, session)
            if visitor is not None and self.audience is Audience.OPERATORS:
                visitor.principal.require_scope(Scope.ADMIN)
        if visitor is not None and (tenant_id := request.path_params.get("tenant_id")):
            tenant = await services_of(request).make(TenantService).get(tenant_id)
            request.state.visitor = replace(visitor, tenant=tenant)
        kept = await self._kept(request, session) if is_safe else None
        return kept or await self._answered(request, handle)

    async def _visitor(self, request: Request, session: Session) -> Visitor:
        visitor = request.state.visitor = await _find_visitor(request, session)
        own_tenant = visitor.principal.tenant_id
        exchange_of(request.scope).tenant_id = own_tenant
        await services_of(request)[LoopTurns].enter(own_tenant)
        return visitor

    async def _to_load_again(self, request: Request, response: Response) -> Response:
        """Return a redirect to the response to a form, so that no reload sends the form again."""
        session: Session | None = getattr(request.state, "session", None)
        is_form = request.method == "POST" and CSRF_HEADER not in request.headers
        if session is None or not (is_form and isinstance(response, HTMLResponse)):
            return response
        # Not of a form that a page of another site sends, and not what ends the session.
        is_own = response.status_code != PermissionDeniedError.status
        if not (self.keeps_answers and is_own) or "set-cookie" in response.headers:
            return response
        page = _KeptPage(
            path=request.url.path,
            csrf=session.csrf,
            status=response.status_code,
            policy=response.headers["content-security-policy"],
            content=bytes(response.body),
        )
        token = request.cookies[cookie_name(request, self.audience)]
        sessions, query = sessions_of(services_of(request)), dict(parse_qsl(request.url.query))
        query.pop(DRAFT, None)
        try:
            number = await sessions.keep(token, msgspec.msgpack.encode(page))
        except StoreUnavailableError:
            return response
        answer = redirect(quote(request.url.path), **query | {KEPT: str(number)})
        answer.headers.update(SECURITY_HEADERS)
        return answer

    async def _kept(self, request: Request, session: Session) -> Response | None:
        number = request.query_params.get(KEPT)
        if number is None:
            return None
        token = request.cookies[cookie_name(request, self.audience)]
        found = await sessions_of(services_of(request)).kept(token, number)
        if found is None:
            return None
        page = msgspec.msgpack.decode(found, type=_KeptPage)
        if (page.path, page.csrf) != (request.url.path, session.csrf):
            return None
        headers = {"content-security-policy": page.policy}
        return HTMLResponse(page.content, status_code=page.status, headers=headers)

    def _to_login(self, request: Request) -> Response:
        """Return a redirect to the login page, which leads back to this page or the form's."""
        if request.headers.get("accept", "").startswith("application/json"):
            raise AuthenticationError(
                "Your session has ended. Log in again in another tab, then send this once more."
            )
        if request.headers.get("hx-request"):
            # htmx would put the login page into a part of this one.
            return Response(status_code=204, headers={"hx-redirect": LOGIN})
        path, query = request.url.path, parse_qsl(request.url.query)
        if request.method != "GET":
            if not self.methods.issuperset(FORM):
                return redirect(LOGIN)
            query.append((DRAFT, "yes"))
        return redirect(LOGIN, next=f"{path}?{urlencode(query)}" if query else path)

    async def _answered(self, request: Request, handle: Handler) -> Response:
        try:
            return await handle(request)
        except ApiError as error:
            form = getattr(request.state, "form", None)
            if form is None or not self.methods.issuperset(FORM):
                raise
            # The page of the form shows what is wrong with it.
            request.state.form, request.state.error = form.to_show(), error
            return await handle(request)


class CustomerRoute(_SessionRoute):
    """A page for customers."""

    audience = Audience.CUSTOMERS


class UploadRoute(CustomerRoute):
    """A page for customers whose form has a file; the page calls `require_token`."""

    reads_form = False


class AnswerRoute(CustomerRoute):
    """A page for customers whose forms are answered at once: nothing of the answer is stored."""

    keeps_answers = False


class OperatorRoute(_SessionRoute):
    """A page for operators. Those with only `admin:read` cannot send forms."""

    audience = Audience.OPERATORS


class TenantRoute(_SessionRoute):
    """A page of a tenant for its customers and, below `/console/tenants`, for operators."""

    def __init__(self, path: str, *args: Any, **options: Any) -> None:
        super().__init__(path, *args, **options)
        is_operators = path.startswith(TENANT_PAGES)
        self.audience = Audience.OPERATORS if is_operators else Audience.CUSTOMERS


class CustomerSessionRoute(CustomerRoute):
    """A page for customers with any session, also of an account that is suspended."""

    needs_rights = False


class OperatorSessionRoute(OperatorRoute):
    """A page for operators with any session."""

    needs_rights = False


def sessions_of(services: Services) -> Sessions:
    """Return the sessions of a deployment."""
    settings = services[Settings]
    return Sessions(
        services[Redis],
        idle=settings.console_idle_timeout,
        longest=settings.console_session_timeout,
    )


async def _find_session(request: Request, audience: Audience) -> Session | None:
    token = request.cookies.get(cookie_name(request, audience))
    return None if token is None else await sessions_of(services_of(request)).find(token, audience)


def _lacks_account(session: Session) -> bool:
    login, is_customer = session.login, session.audience is Audience.CUSTOMERS
    return is_customer and isinstance(login, PersonLogin) and not login.tenant_id


async def _find_visitor(request: Request, session: Session) -> Visitor:
    principal = await principal_of(request, session.login, session.audience)
    return Visitor(admitted_principal(principal, session.audience), session, request)


async def principal_of(
    request: Request, login: KeyLogin | PersonLogin, audience: Audience
) -> Principal:
    """Return the principal of a session, with the rights that it has now.

    Raises AuthenticationError if the key or member has none any more, or if the deployment no
    longer accepts such logins.
    """
    services = services_of(request)
    if isinstance(login, KeyLogin):
        require_key_login(services)
        return await services[Authenticator].principal_of_digest(
            login.prefix, login.digest, address=address_of(request)
        )
    provider = services.find(OidcProvider)
    if provider is None or provider.issuer != login.issuer:
        raise AuthenticationError("The identity provider of the session is not in use any more.")
    if audience is Audience.OPERATORS:
        return provider.operator(login.subject, login.operator_values)
    person = services[Authenticator].person(login.issuer, login.subject)
    role = provider.roles(login.role_values).get(login.tenant_id)
    return await services[Authenticator].principal_of_member(login.tenant_id, person, role=role)


def require_key_login(services: Services) -> None:
    """Raise AuthenticationError if keys do not log in here."""
    if not services[Settings].console_key_login:
        raise AuthenticationError("This console accepts no keys (SLUICE_CONSOLE_KEY_LOGIN).")


def admitted_principal(principal: Principal, audience: Audience) -> Principal:
    """Return the principal in a console. Raises PermissionDeniedError if it may not log in."""
    principal.require_scope(*sorted(_SCOPES[audience]))
    return replace(principal, is_operator=audience is Audience.OPERATORS)


def cookie_name(request: Request, audience: Audience) -> str:
    """Return the name of a session's cookie. Ports of one host share cookies, audiences do not."""
    name = "sluice" if audience is Audience.CUSTOMERS else "sluice-operators"
    return f"__Host-{name}" if is_secure(request) else name


def set_cookie(
    request: Request, response: Response, name: str, value: str, *, max_age: int | None = None
) -> None:
    """Set a cookie that scripts cannot read and no other site can send with a form.

    By default the browser deletes it when it ends; `max_age` is in seconds.
    """
    response.set_cookie(
        name,
        value,
        max_age=max_age,
        path="/",
        secure=is_secure(request),
        httponly=True,
        samesite="lax",
    )


def delete_cookie(request: Request, response: Response, name: str) -> None:
    """Delete a cookie."""
    response.delete_cookie(name, path="/", secure=is_secure(request), httponly=True)


def is_secure(request: Request) -> bool:
    """Whether the browser uses https, directly or to a proxy."""
    settings = services_of(request)[Settings]
    urls = (settings.public_url, settings.operator_public_url)
    return request.url.scheme == "https" or any(url and url.startswith("https:") for url in urls)


def origin_of(request: Request, audience: Audience) -> str:
    """Return the URL of a listener: the configured one, else that of this request."""
    settings = services_of(request)[Settings]
    is_customers = audience is Audience.CUSTOMERS
    configured = settings.public_url if is_customers else settings.operator_public_url
    if configured is not None:
        return configured
    host = request.headers.get("host", "")
    return f"{request.url.scheme}://{host if _PLAIN_HOST.fullmatch(host) else 'HOST'}"


def base_url(request: Request) -> str:
    """Return the URL of the API."""
    return f"{origin_of(request, Audience.CUSTOMERS)}/v1"


def address_of(request: Request) -> str | None:
    """Return the address of the client."""
    return None if request.client is None else request.client.host


def require_same_origin(request: Request) -> None:
    """Raise PermissionDeniedError if a page of another site sends the request."""
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site", "same-origin")
    host = urlsplit(origin or "").netloc
    is_own = origin is None or (bool(host) and host == request.headers.get("host"))
    if not is_own or site not in ("same-origin", "none"):
        raise PermissionDeniedError("The form was sent by a page of another site.")


def _has_file(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("multipart/form-data")


async def _require_token(request: Request, session: Session) -> None:
    given = request.headers.get(CSRF_HEADER)
    if given is None:
        request.state.form = await read_form(request)
        given = request.state.form[CSRF_FIELD]
    require_token(session, given)


def require_token(session: Session, given: str) -> None:
    """Raise PermissionDeniedError if a form has not the token of the session."""
    if not secrets.compare_digest(given.encode(), session.csrf.encode()):
        raise PermissionDeniedError("The form is from another session. Load the page again.")


def redirect(path: str, **query: str) -> Response:
    """Return a redirect to a page of the console, after which the browser sends GET."""
    target = f"{path}?{urlencode(query)}" if query else path
    return RedirectResponse(target, status_code=303)


def as_api_error(error: Exception) -> ApiError:
    """Return an expected exception as the error of the API that describes it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        problem = error.errors()[0]
        name = str(problem["loc"][-1])
        return InvalidParameterError(
            f"'{name}': {problem['msg']}. Given: {shown(problem.get('input'))}.", param=name
        )
    return queue_unavailable()


def error_page(request: Request, error: Exception) -> Response:
    """Return an error as a page."""
    failure = as_api_error(error)
    status = failure.status_for(ErrorStyle.OPENAI)
    return page(request, "error.html", status=status, error=failure)


async def no_page(request: Request) -> Response:
    """Answer for a path that no page has, as a page. Raises NotFoundError."""
    path = request.url.path
    if path.endswith("/"):
        return redirect(path.rstrip("/"))
    raise NotFoundError(f"There is no page {shown(path)}.")


async def _session_of(request: Request) -> Session:
    session: Session = request.state.session
    return session


async def _tenant_of(request: Request) -> Tenant:
    tenant: Tenant = request.state.visitor.tenant
    return tenant


def needs(*scopes: Scope, whole: bool = False) -> Callable[[Request], Awaitable[Visitor]]:
    """Return a dependency that gives the visitor of a page.

    For customers, it raises PermissionDeniedError without one of the scopes, and for a `whole`
    tenant's page with the credential of a project.
    """

    async def dependency(request: Request) -> Visitor:
        visitor: Visitor = request.state.visitor
        if not visitor.is_operator:
            visitor.principal.require_scope(*scopes)
        if whole:
            visitor.require_whole()
        return visitor

    return dependency


CurrentSession = Annotated[Session, Depends(_session_of)]
SeenTenant = Annotated[Tenant, Depends(_tenant_of)]
"""The tenant in the path of an operator's page."""
AnyVisitor = Annotated[Visitor, Depends(needs(*Scope))]
