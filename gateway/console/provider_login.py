"""Log in at the identity provider, and choose one of a person's accounts."""

import re
from typing import Annotated, Final
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Query, Request, Response
from redis.asyncio import Redis

from gateway.accounts.members import MemberService
from gateway.auth.authenticator import Authenticator
from gateway.auth.oidc import Identity, OidcProvider
from gateway.auth.sessions import (
    ATTEMPT_VALID,
    Attempt,
    Audience,
    PersonLogin,
    Session,
    begin_attempt,
    use_attempt,
)
from gateway.console.forms import Form
from gateway.console.login import HOME, SESSION_ROUTES, begin, login_page, safe_page
from gateway.console.rendering import page
from gateway.console.routing import (
    ACCOUNTS,
    FORM,
    LOGIN,
    CurrentSession,
    PageRoute,
    address_of,
    admitted_principal,
    cookie_name,
    delete_cookie,
    is_secure,
    origin_of,
    principal_of,
    redirect,
    sessions_of,
    set_cookie,
)
from gateway.http.allowances import FailedLogins, network_of
from gateway.http.services import AllServices, Services, services_of
from gateway.records.errors import (
    ApiError,
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    PermissionDeniedError,
    shown,
)

PROVIDER_LOGIN: Final = f"{LOGIN}/provider"
CALLBACK: Final = f"{LOGIN}/callback"
_ERROR: Final = re.compile(r"[a-z_]{1,50}")

Next = Annotated[str, Query(alias="next", max_length=2000)]
Parameter = Annotated[str, Query(max_length=4096)]


def provider_router(audience: Audience) -> APIRouter:
    """Return the routes with which people of one audience log in at the identity provider."""
    router = APIRouter(route_class=PageRoute, include_in_schema=False)

    @router.get(PROVIDER_LOGIN)
    async def begin_login(request: Request, following: Next = HOME) -> Response:
        try:
            return await _to_provider(request, audience, following)
        except ApiError as error:
            return login_page(request, audience, following=following, error=error)

    @router.get(CALLBACK)
    async def finish_login(
        request: Request,
        *,
        state: Parameter = "",
        code: Parameter = "",
        iss: Annotated[str | None, Query(max_length=4096)] = None,
        error: Parameter = "",
    ) -> Response:
        following = HOME
        try:
            provider = _provider_of(services_of(request))
            attempt = await _use_attempt(request, audience, state)
            following = attempt.following
            if error or not code:
                reason = error if _ERROR.fullmatch(error) else "no code"
                raise AuthenticationError(
                    f"The identity provider did not log you in ({reason}). Log in again."
                )
            identity = await provider.redeem(
                code,
                issuer=iss,
                redirect_uri=attempt.redirect_uri,
                nonce=attempt.nonce,
                code_verifier=attempt.code_verifier,
            )
            response = await _begin_session(request, provider, attempt, identity)
        except ApiError as failure:
            response = login_page(request, audience, following=following, error=failure)
        delete_cookie(request, response, _attempt_cookie(request, state))
        return response

    return router


accounts = APIRouter(route_class=SESSION_ROUTES[Audience.CUSTOMERS], include_in_schema=False)


@accounts.api_route(ACCOUNTS, methods=FORM)
async def choose_account(
    request: Request, services: AllServices, session: CurrentSession, following: Next = HOME
) -> Response:
    """Let a person choose one of several accounts, with which the session continues."""
    login, form = _person_of(session), Form.of_request(request)
    person = services[Authenticator].person(login.issuer, login.subject)
    roles = _provider_of(services).roles(login.role_values)
    memberships = await services.make(MemberService).of_person(person, roles)
    if not form.is_sent:
        return page(
            request,
            "accounts.html",
            name=login.name,
            memberships=memberships,
            current=login.tenant_id,
            csrf=session.csrf,
            following=safe_page(following),
        )
    wanted = form["tenant"]
    if wanted not in {tenant_id for tenant_id, *_ in memberships}:
        raise PermissionDeniedError(f"You are not a member of the account {shown(wanted)}.")
    token = request.cookies[cookie_name(request, session.audience)]
    await sessions_of(services).choose(
        token, session, msgspec.structs.replace(login, tenant_id=wanted)
    )
    return redirect(safe_page(form["next"]))


def _provider_of(services: Services) -> OidcProvider:
    provider = services.find(OidcProvider)
    if provider is None:
        raise NotFoundError("This deployment has no identity provider (SLUICE_OIDC_ISSUER).")
    return provider


async def _to_provider(request: Request, audience: Audience, following: str) -> Response:
    services = services_of(request)
    provider, network = _provider_of(services), network_of(address_of(request) or "")
    # Each beginning is stored: without a limit, one client could fill the memory of Redis.
    services[FailedLogins].require(network)
    services[FailedLogins].use(network)
    redirect_uri = f"{origin_of(request, audience)}{CALLBACK}"
    state, browser, attempt = await begin_attempt(
        services[Redis], audience, redirect_uri=redirect_uri, following=safe_page(following)
    )
    response = redirect(
        await provider.login_url(
            redirect_uri=redirect_uri,
            state=state,
            nonce=attempt.nonce,
            code_verifier=attempt.code_verifier,
        )
    )
    seconds = int(ATTEMPT_VALID.total_seconds())
    set_cookie(request, response, _attempt_cookie(request, state), browser, max_age=seconds)
    return response


def _attempt_cookie(request: Request, state: str) -> str:
    """Return the name of a login's cookie, so that several tabs can log in at the same time."""
    part = "".join(each for each in state[:8] if each.isascii() and each.isalnum())
    return ("__Host-" if is_secure(request) else "") + f"sluice-attempt-{part}"


async def _use_attempt(request: Request, audience: Audience, state: str) -> Attempt:
    attempt = await use_attempt(
        services_of(request)[Redis],
        audience,
        state=state,
        browser=request.cookies.get(_attempt_cookie(request, state), ""),
    )
    if attempt is None:
        raise BadRequestError(
            "This login has expired, is complete, or began in another browser. Log in again."
        )
    return attempt


async def _begin_session(
    request: Request, provider: OidcProvider, attempt: Attempt, identity: Identity
) -> Response:
    services, following = services_of(request), attempt.following
    login = PersonLogin(
        issuer=provider.issuer,
        subject=identity.subject,
        name=identity.email or identity.subject,
        operator_values=identity.operator_values,
        role_values=identity.role_values,
    )
    if attempt.audience is Audience.OPERATORS:
        if not identity.operator_values:
            raise PermissionDeniedError(
                f"You are not an operator. Your subject is {shown(identity.subject)}."
            )
        admitted_principal(await principal_of(request, login, attempt.audience), attempt.audience)
    else:
        login, has_choice = await _customer(services, login, identity)
        if has_choice:
            following = f"{ACCOUNTS}?{urlencode({'next': following})}"
    response = await begin(
        request,
        attempt.audience,
        login,
        login.owner,
        following=following,
        id_token=identity.id_token,
    )
    services[FailedLogins].use(network_of(address_of(request) or ""), -1)
    return response


async def _customer(
    services: Services, login: PersonLogin, identity: Identity
) -> tuple[PersonLogin, bool]:
    """Return the login with the person's account, and whether the person has several.

    Raises PermissionDeniedError for a person without one.
    """
    person = services[Authenticator].person(login.issuer, login.subject)
    roles = _provider_of(services).roles(login.role_values)
    found = await services.make(MemberService).log_in(person, identity.email, roles)
    if not found:
        email = "no verified e-mail" if identity.email is None else f"the e-mail {identity.email}"
        raise PermissionDeniedError(
            "You are not a member of any account. Ask an owner of your account to add you. "
            f"Your subject is {shown(identity.subject)}, with {email}."
        )
    if len(found) > 1:
        return login, True
    return msgspec.structs.replace(login, tenant_id=found[0][0]), False


def _person_of(session: Session) -> PersonLogin:
    if isinstance(session.login, PersonLogin):
        return session.login
    raise NotFoundError("Only people who logged in at the identity provider have accounts.")
