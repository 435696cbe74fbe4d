"""Authenticate people at an OpenID provider: authorization code flow with PKCE."""

import asyncio
import hmac
import logging
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import quote_plus

import httpx
import jwt
import msgspec

from gateway.auth.jwt_verifier import subject_of
from gateway.platform.settings import Settings
from gateway.records.checks import checked_email
from gateway.records.errors import (
    AuthenticationError,
    InvalidParameterError,
    ServiceUnavailableError,
)
from gateway.records.principal import Principal
from gateway.records.scopes import Role, Scope

logger = logging.getLogger(__name__)

T = TypeVar("T")

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA")
"""Accepted signatures of ID tokens. The client secret signs none: it is no key of the provider."""
FRESH_SECONDS: Final = 600.0
"""How long the provider's metadata and keys are used without a request."""
TIMEOUT_SECONDS: Final = 10.0
"""How long all requests to the provider for one step of a login take at most."""
_DISCOVERY: Final = "/.well-known/openid-configuration"
_CLAIMS: Final = ("iss", "sub", "aud", "exp", "iat")
"""Claims of every ID token: section 2 of OpenID Connect Core."""
_JWT: Final = jwt.PyJWT({"enforce_minimum_key_length": True, "require": list(_CLAIMS)})


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


class _Provider(NamedTuple):
    """What asks the provider during one step of a login."""

    client: httpx.AsyncClient
    metadata: Metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A person whom the provider has authenticated."""

    subject: str
    email: str | None
    """The verified address in lower case; None without one."""
    operator_values: tuple[str, ...]
    """Values of the operators' claim that the settings map to rights."""
    role_values: tuple[str, ...]
    """Values of the claim of roles that the settings map to roles."""
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
    """

    def __init__(self, settings: Settings, *, issuer: str, client_id: str) -> None:
        self.issuer = issuer
        self._client_id = client_id
        secret = settings.oidc_client_secret
        self._client_secret = None if secret is None else secret.get_secret_value()
        self._scopes = settings.oidc_scopes
        self._leeway = settings.jwt_leeway
        self._operator_claim = settings.oidc_operator_claim
        self._operator_scopes = {
            **dict.fromkeys(settings.oidc_operator_reader_values, Scope.ADMIN_READ),
            **dict.fromkeys(settings.oidc_operator_values, Scope.ADMIN),
        }
        if self._operator_claim == "email":
            scopes = self._operator_scopes.items()
            self._operator_scopes = {value.lower(): scope for value, scope in scopes}
        self._role_claim = settings.oidc_role_claim
        self._roles = settings.oidc_roles
        self._email_tenants = settings.oidc_email_tenants
        self._trust = httpx.create_ssl_context()
        self._metadata, self._keys = _Cached(), _Cached()
        self._fetching = asyncio.Lock()

    @classmethod
    def from_settings(cls, settings: Settings) -> "OidcProvider | None":
        """Create the provider that the settings name; None if they name none."""
        if settings.oidc_issuer is None or settings.oidc_client_id is None:
            return None
        return cls(settings, issuer=settings.oidc_issuer, client_id=settings.oidc_client_id)

    async def require_keys(self) -> None:
        """Read the provider's metadata and keys."""
        async with self._asking() as provider:
            await self._read_keys(provider, max_age=0)

    async def login_url(
        self, *, redirect_uri: str, state: str, nonce: str, code_verifier: str
    ) -> str:
        """Return the URL at the provider with which a login begins."""
        async with self._asking() as provider:
            endpoint = provider.metadata.authorization_endpoint
        challenge = _base64url(sha256(code_verifier.encode()).digest())
        return _with_query(
            endpoint,
            response_type="code",
            client_id=self._client_id,
            redirect_uri=redirect_uri,
            scope=" ".join(self._scopes),
            state=state,
            nonce=nonce,
            code_challenge=challenge,
            code_challenge_method="S256",
        )

    async def redeem(
        self, code: str, *, issuer: str | None, redirect_uri: str, nonce: str, code_verifier: str
    ) -> Identity:
        """Return the person whom an authorization response identifies.

        `issuer` is the response's `iss`, if it has one; the login's URL had the other values.
        Raises AuthenticationError if the provider rejects the code, or the ID token is invalid.
        """
        async with self._asking() as provider:
            names_issuer = provider.metadata.authorization_response_iss_parameter_supported
            if issuer != self.issuer and (issuer is not None or names_issuer):
                raise AuthenticationError("The response is from another identity provider.")
            token = await self._exchange(
                provider,
                grant_type="authorization_code",
                code=code,
                redirect_uri=redirect_uri,
                code_verifier=code_verifier,
            )
            id_token, access_token = token.get("id_token"), token.get("access_token")
            if not isinstance(id_token, str) or not isinstance(access_token, str):
                raise AuthenticationError("The identity provider sent no ID token.")
            claims = await self._verify(provider, id_token, nonce=nonce, access_token=access_token)
            claims = await self._complete(provider, claims, access_token)
        email = _verified_email(claims, self._email_tenants)
        return Identity(
            subject=subject_of(claims),
            email=email,
            operator_values=self._operator_values(claims, email),
            role_values=_mapped(self._roles, claims.get(self._role_claim or "")),
            id_token=id_token,
        )

    async def logout_url(self, *, id_token: str | None, redirect_uri: str) -> str | None:
        """Return the URL at the provider that ends the person's session there.

        Return None if the provider has no such URL or does not respond.
        """
        try:
            async with self._asking() as provider:
                endpoint = provider.metadata.end_session_endpoint
        except ServiceUnavailableError:
            return None
        if endpoint is None:
            return None
        hint = {} if id_token is None else {"id_token_hint": id_token}
        return _with_query(
            endpoint,
            client_id=self._client_id,
            post_logout_redirect_uri=redirect_uri,
            **hint,
        )

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

    def roles(self, values: tuple[str, ...]) -> dict[str, Role]:
        """Return the roles by tenant of a person who logged in with these values of the claim.

        Of several roles in a tenant, it is the one with the most rights.
        """
        roles: dict[str, Role] = {}
        for tenant_id, role in chain.from_iterable(
            self._roles.get(value, {}).items() for value in values
        ):
            roles[tenant_id] = Role.most_of((role, roles.get(tenant_id, role))) or role
        return roles

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[_Provider]:
        try:
            async with (
                asyncio.timeout(TIMEOUT_SECONDS),
                httpx.AsyncClient(timeout=TIMEOUT_SECONDS, verify=self._trust) as client,
            ):
                yield _Provider(client, await self._read_metadata(client))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
            # ValueError: of JSON, URLs and msgspec.
            logger.warning("cannot use the identity provider: %.200r", error)
            raise ServiceUnavailableError(
                "The identity provider does not respond as expected. Try again in a minute."
            ) from None

    async def _read_metadata(self, client: httpx.AsyncClient) -> Metadata:
        async with self._fetching:
            if not self._metadata.is_younger(FRESH_SECONDS):
                url = self.issuer.rstrip("/") + _DISCOVERY
                try:
                    found = await _get(client, url, Metadata)
                except (httpx.HTTPError, ValueError):
                    if self._metadata.content is None:
                        raise
                    # Only the document may be unavailable.
                    found = self._metadata.content
                if found.issuer != self.issuer:
                    raise ValueError(f"its issuer is {found.issuer!r}, not {self.issuer!r}")
                self._metadata = _Cached(found, time.monotonic())
        content: Metadata = self._metadata.content
        return content

    async def _read_keys(self, provider: _Provider, *, max_age: float) -> None:
        client, metadata = provider
        async with self._fetching:
            if not self._keys.is_younger(max_age):
                found = await _get(client, metadata.jwks_uri, dict[str, Any])
                keys = msgspec.convert(found.get("keys"), list[dict[str, Any]])
                self._keys = _Cached(keys, time.monotonic())

    async def _read_key(self, provider: _Provider, id_token: str, *, max_age: float) -> jwt.PyJWK:
        """Return the provider's key that a token names, or its only key. Raises PyJWTError."""
        header = jwt.get_unverified_header(id_token)
        await self._read_keys(provider, max_age=max_age)
        algorithm, kid = header.get("alg"), header.get("kid")
        matching = [
            key
            for key in self._keys.content
            if (kid is None or key.get("kid") == kid)
            and key.get("use", "sig") == "sig"
            and key.get("alg", algorithm) == algorithm
        ]
        if len(matching) != 1 or algorithm not in ALGORITHMS:
            raise jwt.InvalidKeyError(f"{len(matching)} keys match {algorithm!r} and {kid!r}")
        return jwt.PyJWK(matching[0], algorithm)

    async def _verify(
        self, provider: _Provider, id_token: str, *, nonce: str, access_token: str
    ) -> Mapping[str, Any]:
        """Return the claims of an ID token: section 3.1.3.7 of OpenID Connect Core."""
        try:
            try:
                key = await self._read_key(provider, id_token, max_age=FRESH_SECONDS)
                claims = self._decode(id_token, key)
            except (jwt.InvalidKeyError, jwt.InvalidSignatureError):
                # The provider may have replaced its keys. Only its own tokens lead here.
                key = await self._read_key(provider, id_token, max_age=0)
                claims = self._decode(id_token, key)
            _check_claims(claims, key, client_id=self._client_id, nonce=nonce, token=access_token)
        except jwt.PyJWTError as error:
            logger.warning("rejected an ID token: %.200r", error)
            raise AuthenticationError(
                "The identity provider sent an invalid ID token. Log in again."
            ) from None
        if not subject_of(claims):
            raise AuthenticationError("The identity provider sent an ID token without a subject.")
        return claims

    def _decode(self, id_token: str, key: jwt.PyJWK) -> dict[str, Any]:
        return _JWT.decode(
            id_token,
            key,
            algorithms=ALGORITHMS,
            audience=self._client_id,
            issuer=self.issuer,
            leeway=self._leeway,
        )

    async def _complete(
        self, provider: _Provider, claims: Mapping[str, Any], access_token: str
    ) -> Mapping[str, Any]:
        """Return claims with those that the provider sends only to its userinfo endpoint."""
        wanted = {"email", "email_verified", self._operator_claim, self._role_claim} - {None}
        is_complete = wanted <= claims.keys()
        if is_complete or provider.metadata.userinfo_endpoint is None:
            return claims
        headers = {"authorization": f"Bearer {access_token}"}
        others = await _get(
            provider.client, provider.metadata.userinfo_endpoint, dict[str, Any], headers
        )
        if others.get("sub") != claims["sub"]:
            raise AuthenticationError("The identity provider described another person.")
        if "email" in claims and str(claims["email"]).lower() != str(others.get("email")).lower():
            # It is about another address than the one in the token.
            others.pop("email_verified", None)
        return {**others, **claims}

    def _operator_values(self, claims: Mapping[str, Any], email: str | None) -> tuple[str, ...]:
        if self._operator_claim is None:
            return ()
        found = email if self._operator_claim == "email" else claims.get(self._operator_claim)
        return _mapped(self._operator_scopes, found)

    async def _exchange(self, provider: _Provider, **form: str) -> dict[str, Any]:
        """Return the response of the token endpoint. Without a secret, the client is public."""
        client, metadata = provider
        methods, secret = metadata.token_endpoint_auth_methods_supported, self._client_secret
        auth = httpx.Auth()
        if secret is None:
            form["client_id"] = self._client_id
        elif "client_secret_basic" not in methods and "client_secret_post" in methods:
            form |= {"client_id": self._client_id, "client_secret": secret}
        else:
            # Section 2.3.1 of RFC 6749.
            auth = httpx.BasicAuth(quote_plus(self._client_id), quote_plus(secret))
        response = await client.post(metadata.token_endpoint, data=form, auth=auth)
        if response.is_server_error:
            response.raise_for_status()
        token = msgspec.json.decode(response.content, type=dict[str, Any])
        if "error" in token or not response.is_success:
            # The text is the provider's, so only the administrator reads it.
            reason = [token.get(name) for name in ("error", "error_description")]
            logger.warning("the identity provider rejected a login: %.200r", reason)
            raise AuthenticationError("The identity provider rejected the login. Log in again.")
        return token


def _check_claims(
    claims: Mapping[str, Any], key: jwt.PyJWK, *, client_id: str, nonce: str, token: str
) -> None:
    """Check what PyJWT does not: the nonce, the authorized party and the access token's hash."""
    if claims.get("nonce") != nonce:
        raise jwt.InvalidTokenError("the nonce is another one")
    if claims.get("azp", client_id) != client_id or (
        isinstance(claims["aud"], list) and len(claims["aud"]) > 1 and "azp" not in claims
    ):
        raise jwt.InvalidTokenError("the token is for another party")
    if "at_hash" in claims and key.algorithm_name != "EdDSA":
        digest = key.Algorithm.compute_hash_digest(token.encode())
        if not hmac.compare_digest(_base64url(digest[: len(digest) // 2]), str(claims["at_hash"])):
            raise jwt.InvalidTokenError("the token is for another access token")


def _base64url(content: bytes) -> str:
    return urlsafe_b64encode(content).decode().rstrip("=")


def _with_query(url: str, **parameters: str) -> str:
    return str(httpx.URL(url).copy_merge_params(parameters))


async def _get(
    client: httpx.AsyncClient, url: str, kind: type[T], headers: Mapping[str, str] | None = None
) -> T:
    response = await client.get(url, headers=headers)
    response.raise_for_status()
    return msgspec.json.decode(response.content, type=kind)


def _mapped(known: Mapping[str, Any], found: Any) -> tuple[str, ...]:
    """Return the known values among those of a claim."""
    values = found if isinstance(found, list) else [found]
    return tuple(value for value in known if value in values)


def _verified_email(claims: Mapping[str, Any], trusted_tenants: tuple[str, ...]) -> str | None:
    email = claims.get("email")
    is_verified = claims.get("email_verified", claims.get("tid") in trusted_tenants)
    # Cognito and others send a string.
    if is_verified not in (True, "true") or not isinstance(email, str):
        return None
    try:
        return checked_email(email)
    except InvalidParameterError:
        return None
