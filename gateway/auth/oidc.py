"""Authenticate people at an OpenID provider: authorization code flow with PKCE."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar
from urllib.parse import quote_plus

import httpx2
import msgspec
from authlib.common.urls import add_params_to_uri
from authlib.integrations.base_client import OAuthError
from authlib.integrations.httpx_client import AsyncOAuth2Client
from authlib.oidc.core import CodeIDToken
from authlib.oidc.discovery import get_well_known_url
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from contract import clock
from gateway.auth.jwt_verifier import subject_of
from gateway.auth.principal import Principal
from gateway.errors import AuthenticationError, InvalidParameterError, ServiceUnavailableError
from gateway.settings import Settings
from gateway.tenancy.checks import checked_email
from gateway.tenancy.scopes import Scope

logger = logging.getLogger(__name__)

T = TypeVar("T")

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA")
"""Accepted signatures of ID tokens. The client secret signs none: it is no key of the provider."""
FRESH_SECONDS: Final = 600.0
"""How long the provider's metadata and keys are used without a request."""
TIMEOUT_SECONDS: Final = 10.0
"""How long all requests to the provider for one step of a login take at most."""


class Metadata(msgspec.Struct, frozen=True):
    """What Sluice reads from the discovery document."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str | None = None
    end_session_endpoint: str | None = None
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A person whom the provider has authenticated."""

    subject: str
    email: str | None
    """The verified address in lower case; None without one."""
    operator_values: tuple[str, ...]
    """Values of the operators' claim that the settings map to rights."""
    id_token: str


@dataclass(slots=True)
class _Cached:
    """A document of the provider."""

    content: Any = None
    fetched_at: float = float("-inf")

    def is_younger(self, seconds: float) -> bool:
        return time.monotonic() - self.fetched_at < seconds


class OidcProvider:
    """The deployment's OpenID provider.

    All methods that request something raise ServiceUnavailableError if the provider does not
    respond, or not as OpenID Connect requires.

    Args:
        issuer: the provider's `iss`.
        client_id: the id under which the provider knows this deployment.
        client_secret: None for a public client.
        scopes: requested at each login.
        leeway: tolerated clock difference.
        operator_claim: claim that grants rights of operators; None: no claim does.
        operator_scopes: the right that each value of this claim grants.
    """

    def __init__(
        self,
        *,
        issuer: str,
        client_id: str,
        client_secret: str | None,
        scopes: tuple[str, ...],
        leeway: timedelta,
        operator_claim: str | None,
        operator_scopes: Mapping[str, Scope],
    ) -> None:
        self.issuer = issuer
        self._client_id = client_id
        self._client_secret = client_secret
        self._scopes = scopes
        self._leeway_seconds = int(leeway.total_seconds())
        self._operator_claim = operator_claim
        self._operator_scopes = operator_scopes
        self._trust = httpx2.create_ssl_context()
        self._metadata, self._keys = _Cached(), _Cached()
        self._fetching = asyncio.Lock()

    @classmethod
    def from_settings(cls, settings: Settings) -> "OidcProvider | None":
        """Create the provider that the settings name; None if they name none."""
        if settings.oidc_issuer is None or settings.oidc_client_id is None:
            return None
        secret, claim = settings.oidc_client_secret, settings.oidc_operator_claim
        scopes = {
            **dict.fromkeys(settings.oidc_operator_reader_values, Scope.ADMIN_READ),
            **dict.fromkeys(settings.oidc_operator_values, Scope.ADMIN),
        }
        if claim == "email":
            scopes = {value.lower(): scope for value, scope in scopes.items()}
        return cls(
            issuer=settings.oidc_issuer,
            client_id=settings.oidc_client_id,
            client_secret=None if secret is None else secret.get_secret_value(),
            scopes=settings.oidc_scopes,
            leeway=settings.jwt_leeway,
            operator_claim=claim,
            operator_scopes=scopes,
        )

    async def login_url(
        self, *, redirect_uri: str, state: str, nonce: str, code_verifier: str
    ) -> str:
        """Return the URL at the provider with which a login begins."""
        async with self._asking() as client:
            metadata = await self._read_metadata(client)
            url, _ = client.create_authorization_url(
                metadata.authorization_endpoint,
                state=state,
                nonce=nonce,
                code_verifier=code_verifier,
                redirect_uri=redirect_uri,
            )
        return str(url)

    async def redeem(
        self, code: str, *, issuer: str | None, redirect_uri: str, nonce: str, code_verifier: str
    ) -> Identity:
        """Return the person whom an authorization response identifies.

        Args:
            code: the response's code.
            issuer: the response's `iss`, if it has one.
            redirect_uri: that of the login's URL.
            nonce: the same.
            code_verifier: the same.

        Raises AuthenticationError if the provider rejects the code, or the ID token is invalid.
        """
        async with self._asking() as client:
            metadata = await self._read_metadata(client)
            names_issuer = metadata.authorization_response_iss_parameter_supported
            if issuer != self.issuer and (issuer is not None or names_issuer):
                raise AuthenticationError("The response is from another identity provider.")
            self._prepare(client, metadata)
            token = await client.fetch_token(
                metadata.token_endpoint,
                grant_type="authorization_code",
                code=code,
                redirect_uri=redirect_uri,
                code_verifier=code_verifier,
            )
            id_token = token.get("id_token")
            if not isinstance(id_token, str):
                raise AuthenticationError("The identity provider sent no ID token.")
            claims = await self._verify(
                client, metadata, id_token, nonce=nonce, access_token=token.get("access_token")
            )
            claims = await self._complete(client, metadata, claims)
        email = _verified_email(claims)
        return Identity(
            subject=subject_of(claims),
            email=email,
            operator_values=self._operator_values(claims, email),
            id_token=id_token,
        )

    async def logout_url(self, *, id_token: str | None, redirect_uri: str) -> str | None:
        """Return the URL at the provider that ends the person's session there.

        Return None if the provider has no such URL or does not respond.
        """
        try:
            async with self._asking() as client:
                metadata = await self._read_metadata(client)
        except ServiceUnavailableError:
            return None
        if metadata.end_session_endpoint is None:
            return None
        query = [("client_id", self._client_id), ("post_logout_redirect_uri", redirect_uri)]
        if id_token is not None:
            query.append(("id_token_hint", id_token))
        return str(add_params_to_uri(metadata.end_session_endpoint, query))

    def operator(self, subject: str, values: tuple[str, ...]) -> Principal:
        """Return the principal of a person who logged in with these values of the claim.

        It has no scopes if the settings map none of the values any more.
        """
        scopes = (self._operator_scopes[each] for each in values if each in self._operator_scopes)
        return Principal(
            tenant_id="",
            tenant_weight=1.0,
            credential_id=f"oidc:{subject}",
            scopes=frozenset(scopes),
            allowed_models=None,
            is_operator=True,
        )

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[AsyncOAuth2Client]:
        # A client of its own for each login, since it holds the person's tokens.
        client = AsyncOAuth2Client(
            self._client_id,
            self._client_secret,
            scope=" ".join(self._scopes),
            code_challenge_method="S256",
            timeout=TIMEOUT_SECONDS,
            verify=self._trust,
        )
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS), client:
                yield client
        except OAuthError as error:
            # The text is the provider's, so only the administrator reads it.
            logger.warning("the identity provider rejected a login: %.200r", str(error))
            raise AuthenticationError(
                "The identity provider rejected the login. Log in again."
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError, ValueError) as error:
            # ValueError: of JSON, URLs and msgspec.
            logger.warning("cannot use the identity provider: %.200r", error)
            raise ServiceUnavailableError(
                "The identity provider does not respond as expected. Try again in a minute."
            ) from None

    async def _read_metadata(self, client: AsyncOAuth2Client) -> Metadata:
        async with self._fetching:
            if not self._metadata.is_younger(FRESH_SECONDS):
                url = get_well_known_url(self.issuer, external=True)
                try:
                    found = await _get(client, url, Metadata)
                except (httpx2.HTTPError, ValueError):
                    if self._metadata.content is None:
                        raise
                    # Only the document may be unavailable.
                    found = self._metadata.content
                if found.issuer != self.issuer:
                    raise ValueError(f"its issuer is {found.issuer!r}, not {self.issuer!r}")
                self._metadata = _Cached(found, time.monotonic())
        content: Metadata = self._metadata.content
        return content

    async def _read_keys(
        self, client: AsyncOAuth2Client, metadata: Metadata, *, max_age: float
    ) -> KeySet:
        async with self._fetching:
            if not self._keys.is_younger(max_age):
                document = await _get(client, metadata.jwks_uri, dict[str, Any])
                try:
                    keys = KeySet.import_key_set(document)  # type: ignore[arg-type]
                except (JoseError, KeyError, TypeError) as error:
                    raise ValueError(f"its keys are unusable: {error}") from error
                self._keys = _Cached(keys, time.monotonic())
        content: KeySet = self._keys.content
        return content

    async def _verify(
        self,
        client: AsyncOAuth2Client,
        metadata: Metadata,
        id_token: str,
        *,
        nonce: str,
        access_token: object,
    ) -> Mapping[str, Any]:
        keys = await self._read_keys(client, metadata, max_age=FRESH_SECONDS)
        try:
            try:
                token = jwt.decode(id_token, keys, ALGORITHMS)
            except (JoseError, ValueError):
                # The provider may have replaced its keys. Only its own tokens lead here.
                keys = await self._read_keys(client, metadata, max_age=0)
                token = jwt.decode(id_token, keys, ALGORITHMS)
            claims = CodeIDToken(
                token.claims,
                token.header,
                options={
                    "iss": {"essential": True, "value": self.issuer},
                    "aud": {"essential": True, "value": self._client_id},
                },
                params={
                    "nonce": nonce,
                    "client_id": self._client_id,
                    "access_token": access_token,
                },
            )
            claims.validate(now=clock.now_ms() // 1000, leeway=self._leeway_seconds)
        except (JoseError, ValueError, TypeError) as error:
            logger.warning("rejected an ID token: %.200r", error)
            raise AuthenticationError(
                "The identity provider sent an invalid ID token. Log in again."
            ) from None
        if not subject_of(claims):
            raise AuthenticationError("The identity provider sent an ID token without a subject.")
        return dict(claims)

    async def _complete(
        self, client: AsyncOAuth2Client, metadata: Metadata, claims: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return claims with those that the provider sends only to its userinfo endpoint."""
        is_complete = {"email", self._operator_claim or "email"} <= claims.keys()
        if is_complete or metadata.userinfo_endpoint is None:
            return claims
        response = await client.get(metadata.userinfo_endpoint)
        response.raise_for_status()
        others = msgspec.json.decode(response.content, type=dict[str, Any])
        if others.get("sub") != claims["sub"]:
            raise AuthenticationError("The identity provider described another person.")
        return {**others, **claims}

    def _operator_values(self, claims: Mapping[str, Any], email: str | None) -> tuple[str, ...]:
        if self._operator_claim is None:
            return ()
        found = email if self._operator_claim == "email" else claims.get(self._operator_claim)
        values = found if isinstance(found, list) else [found]
        return tuple(value for value in self._operator_scopes if value in values)

    def _prepare(self, client: AsyncOAuth2Client, metadata: Metadata) -> None:
        """Let a client authenticate as the provider requires. Without a secret, it does not."""
        if self._client_secret is None:
            return
        methods = metadata.token_endpoint_auth_methods_supported
        if "client_secret_basic" not in methods and "client_secret_post" in methods:
            client.token_endpoint_auth_method = "client_secret_post"  # noqa: S105 - a name
        else:
            # Section 2.3.1 of RFC 6749; Authlib sends them as they are.
            client.client_id = quote_plus(self._client_id)
            client.client_secret = quote_plus(self._client_secret)


async def _get(client: AsyncOAuth2Client, url: str, kind: type[T]) -> T:
    response = await client.request("GET", url, withhold_token=True)
    response.raise_for_status()
    return msgspec.json.decode(response.content, type=kind)


def _verified_email(claims: Mapping[str, Any]) -> str | None:
    email = claims.get("email")
    if claims.get("email_verified") is not True or not isinstance(email, str):
        return None
    try:
        return checked_email(email)
    except InvalidParameterError:
        return None
