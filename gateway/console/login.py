"""Log in with an API key or a link, and log out."""

import re
import secrets
from typing import Annotated, Final
from urllib.parse import unquote

from fastapi import APIRouter, Query, Request, Response
from redis.asyncio import Redis

from gateway.auth.api_key import ApiKey, MalformedKeyError
from gateway.auth.authenticator import Authenticator
from gateway.auth.oidc import OidcProvider
from gateway.auth.sessions import (
    LINK_PATH,
    Audience,
    KeyLogin,
    PersonLogin,
    Session,
    open_id_token,
    use_link,
)
from gateway.console.forms import Form, read_form
from gateway.console.rendering import page
from gateway.console.routing import (
    LOGIN,
    CurrentSession,
    CustomerSessionRoute,
    OperatorSessionRoute,
    PageRoute,
    address_of,
    admitted_principal,
    cookie_name,
    delete_cookie,
    is_secure,
    origin_of,
    principal_of,
    redirect,
    require_key_login,
    sessions_of,
    set_cookie,
)
from gateway.http.allowances import FailedLogins, UnpaidRequests, network_of
from gateway.http.exchange import exchange_of
from gateway.http.services import AllServices, services_of
from gateway.platform.settings import Settings
from gateway.records.errors import ApiError, AuthenticationError, PermissionDeniedError

HOME: Final = "/console"
_OWN_PAGE: Final = re.compile(r"/console(/[A-Za-z0-9._~:@%/-]*)?(\?[A-Za-z0-9._~:@%/&=+*,-]*)?")
_MAX_TOKEN: Final = 200
SESSION_ROUTES: Final = {
    Audience.CUSTOMERS: CustomerSessionRoute,
    Audience.OPERATORS: OperatorSessionRoute,
}


def login_router(audience: Audience) -> APIRouter:
    """Return the routes with which one audience logs in and out."""
    router = APIRouter(include_in_schema=False)
    public = APIRouter(route_class=PageRoute)
    own = APIRouter(route_class=SESSION_ROUTES[audience])

    @public.get(LOGIN)
    async def show_login(
        request: Request, next_: Annotated[str, Query(alias="next", max_length=2000)] = HOME
    ) -> Response:
        return login_page(request, audience, following=next_)

    @public.post(LOGIN)
    async def log_in(request: Request) -> Response:
        form = await read_form(request)
        following = form["next"] or HOME
        try:
            _require_own_form(request, form, audience)
            login, subject = await _check_key(request, form["key"], audience)
        except ApiError as error:
            return login_page(request, audience, following=following, error=error)
        return await begin(request, audience, login, subject, following=following)

    @public.get(LINK_PATH)
    async def enter(
        request: Request, token: Annotated[str, Query(min_length=1, max_length=_MAX_TOKEN)]
    ) -> Response:
        """Log in with a link that is valid once."""
        services = services_of(request)
        login = await use_link(services[Redis], token, ends=False)
        # Before the link ends: a database that is away must not use it up.
        principal = None if login is None else await principal_of(request, login, audience)
        if principal is None or (login := await use_link(services[Redis], token)) is None:
            # Such as the second load of the page by a browser that has logged in with the link.
            token = request.cookies.get(cookie_name(request, audience), "")
            if await sessions_of(services).find(token, audience) is not None:
                return redirect(HOME)
            error = AuthenticationError(
                "The link has been used, or is older than an hour. Log in with a key, or run "
                "`sluice console link` where Sluice runs: it prints new links."
            )
            return login_page(request, audience, following=HOME, error=error)
        subject = admitted_principal(principal, audience).actor
        return await begin(request, audience, login, subject, following=HOME)

    @own.post("/console/logout")
    async def log_out(request: Request, services: AllServices, session: CurrentSession) -> Response:
        await sessions_of(services).end(request.cookies[cookie_name(request, audience)])
        return await _logged_out(request, session)

    @own.post("/console/logout-everywhere")
    async def log_out_everywhere(
        request: Request, services: AllServices, session: CurrentSession
    ) -> Response:
        await sessions_of(services).sign_out_everywhere(session.subject)
        return await _logged_out(request, session)

    router.include_router(public)
    router.include_router(own)
    return router


def safe_page(path: str) -> str:
    """Return a path if it is a page of the console, else the first page."""
    is_own = _OWN_PAGE.fullmatch(path) is not None and ".." not in unquote(path)
    return path if is_own else HOME


def login_page(
    request: Request, audience: Audience, *, following: str, error: ApiError | None = None
) -> Response:
    """Return the page on which people choose how to log in, with the reason why they must again."""
    services = services_of(request)
    name = _form_cookie(request, audience)
    token = request.cookies.get(name) or secrets.token_urlsafe(32)
    response = page(
        request,
        "login.html",
        audience=audience,
        token=token,
        following=safe_page(following),
        has_provider=services.find(OidcProvider) is not None,
        has_keys=services[Settings].console_key_login,
        error=error,
    )
    set_cookie(request, response, name, token)
    return response


def _form_cookie(request: Request, audience: Audience) -> str:
    """Return the name of the cookie that equals the login form's token."""
    return ("__Host-" if is_secure(request) else "") + f"sluice-login-{audience}"


def _require_own_form(request: Request, form: Form, audience: Audience) -> None:
    token = request.cookies.get(_form_cookie(request, audience), "")
    if not token or not secrets.compare_digest(token.encode(), form["csrf"].encode()):
        raise PermissionDeniedError("The form has expired. Send it again.")


async def _check_key(request: Request, text: str, audience: Audience) -> tuple[KeyLogin, str]:
    """Return the login of a key, and whose it is. Raises the errors of authentication."""
    services, address = services_of(request), address_of(request)
    require_key_login(services)
    network = network_of(address or "")
    services[FailedLogins].require(network)
    try:
        key = ApiKey.parse(text)
        principal = await services[Authenticator].principal_of_digest(
            key.prefix, key.digest(), address=address
        )
    except MalformedKeyError as error:
        services[FailedLogins].use(network)
        raise AuthenticationError(
            f"The API key is malformed: {error}. Check that it was copied completely."
        ) from None
    except AuthenticationError:
        services[FailedLogins].use(network)
        raise
    services[UnpaidRequests].admit(exchange_of(request.scope), principal)
    subject = admitted_principal(principal, audience).actor
    return KeyLogin(key.prefix, key.digest()), subject


async def begin(
    request: Request,
    audience: Audience,
    login: KeyLogin | PersonLogin,
    subject: str,
    *,
    following: str,
    id_token: str = "",
) -> Response:
    """Begin a session under a new token, which no one else can know, and end the earlier one."""
    sessions, name = sessions_of(services_of(request)), cookie_name(request, audience)
    if (earlier := request.cookies.get(name)) is not None:
        await sessions.end(earlier)
    token = await sessions.begin(audience, login, subject, id_token=id_token)
    response = redirect(safe_page(following))
    set_cookie(request, response, name, token)
    delete_cookie(request, response, _form_cookie(request, audience))
    return response


async def _logged_out(request: Request, session: Session) -> Response:
    """Delete the cookie. A person's browser then ends the session at the identity provider."""
    name, provider = cookie_name(request, session.audience), services_of(request).find(OidcProvider)
    target = None
    if provider is not None and isinstance(session.login, PersonLogin):
        target = await provider.logout_url(
            id_token=open_id_token(session, request.cookies[name]),
            redirect_uri=f"{origin_of(request, session.audience)}{LOGIN}",
        )
    # No redirect: the policy of the page with the form forbids forms that lead to other sites.
    response = redirect(LOGIN) if target is None else page(request, "left.html", target=target)
    delete_cookie(request, response, name)
    return response
