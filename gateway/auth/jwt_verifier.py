"""Verify JWTs that an identity provider signed for our tenants."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import jwt
import msgspec

from contract.dialect import Dialect
from gateway.platform.settings import SCOPE_CLAIMS, JwtAlgorithm, Settings
from gateway.records.checks import is_storable
from gateway.records.errors import (
    AuthenticationError,
    ExpiredCredentialError,
    ServiceUnavailableError,
    StartupError,
    shown,
)
from gateway.records.scopes import DEFAULT_SCOPES, TENANT_SCOPES, Role, Scope

logger = logging.getLogger(__name__)

CHECK_SECONDS: Final = 1.0
"""Minimum interval between checks whether the file was replaced."""

FRESH_SECONDS: Final = 600.0
"""How long the keys of a URL are used without a request."""
AGAIN_SECONDS: Final = 10.0
"""Minimum interval between two requests for them, whatever keys tokens name."""
FETCH_SECONDS: Final = 5.0

MAX_SUBJECT_CHARACTERS: Final = 255
"""Maximum length of `sub` in OpenID Connect.

The ledger indexes it, and PostgreSQL cannot index long texts.
"""
_KEY_TYPES: Final[Mapping[JwtAlgorithm, str]] = {
    JwtAlgorithm.RS256: "RSA",
    JwtAlgorithm.ES256: "EC",
    JwtAlgorithm.EDDSA: "OKP",
}
_WANTED: Final[Mapping[Any, str]] = {
    str: "a string",
    list[str]: "a list of strings",
    str | list[str]: "a string or a list of strings",
}
_REFUSALS: Final[Mapping[type[jwt.PyJWTError], str]] = {
    jwt.InvalidSignatureError: "The token's signature is wrong.",
    jwt.InvalidIssuerError: "The token's issuer (claim 'iss') is not accepted.",
    jwt.InvalidAudienceError: "The token is for another audience (claim 'aud').",
    jwt.ImmatureSignatureError: "The token is not valid yet (claim 'nbf' or 'iat').",
    jwt.InvalidAlgorithmError: "The token's algorithm does not match the key that its 'kid' names.",
    jwt.InvalidKeyError: "The key that the token's 'kid' names is too weak for its algorithm.",
}
_JWT = jwt.PyJWT({"enforce_minimum_key_length": True, "require": ["exp", "iss", "aud"]})


class JwksError(StartupError):
    """The file or response cannot be read or contains no usable key."""


class JwksFile:
    """Keys of a JWKS file by their `kid`.

    Args:
        path: the file; it must be readable and contain a usable key when the gateway starts.
        monotonic: clock in seconds.
    """

    def __init__(self, path: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._monotonic = monotonic
        self._checked_at = monotonic()
        self._version = _version(path)
        self._keys = _read(path)

    def get(self, kid: str) -> jwt.PyJWK | None:
        """Return the key with this id from the latest readable version of the file."""
        if self._monotonic() - self._checked_at >= CHECK_SECONDS:
            self._checked_at = self._monotonic()
            self._reload()
        return self._keys.get(kid)

    def _reload(self) -> None:
        try:
            version = _version(self._path)
            if version != self._version:
                self._keys = _read(self._path)
                self._version = version
                logger.info("JWKS file reloaded: %d keys", len(self._keys))
        except JwksError as error:
            # The previous keys stay valid, so a broken file locks out nobody.
            logger.warning(
                "cannot reload the JWKS file, its previous keys remain in use: %s", error
            )


class JwksUrl:
    """Keys that an issuer publishes, by their `kid`. The first token requests them.

    Args:
        url: of the JWKS.
        monotonic: clock in seconds.
    """

    def __init__(self, url: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._monotonic = monotonic
        self._trust = httpx.create_ssl_context()
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._fetched_at = float("-inf")
        self._is_read = False
        """Whether the latest response was usable."""
        self._fetching: asyncio.Task[None] | None = None

    def get(self, kid: str) -> jwt.PyJWK | None:
        """Return the key with this id from the latest usable response."""
        return self._keys.get(kid)

    async def refresh(self, kid: str) -> None:
        """Request the keys if they are old or lack this one, unless they were requested lately.

        Raises ServiceUnavailableError if it is unknown whether the issuer has this one.
        """
        least = FRESH_SECONDS if kid in self._keys else AGAIN_SECONDS
        if self._monotonic() - self._fetched_at >= least:
            if self._fetching is None or self._fetching.done():
                # A task, because others wait for it if this client disconnects.
                self._fetching = asyncio.create_task(self._fetch())
            await asyncio.shield(self._fetching)
        if kid not in self._keys and not self._is_read:
            raise ServiceUnavailableError(
                "The keys of the token's issuer cannot be read. Retry.",
                retry_after_seconds=AGAIN_SECONDS,
            )

    async def _fetch(self) -> None:
        try:
            async with (
                asyncio.timeout(FETCH_SECONDS),
                httpx.AsyncClient(verify=self._trust) as http,
            ):
                response = (await http.get(self._url)).raise_for_status()
            self._keys = _usable(response.content, f"The JWKS of {self._url}")
            self._is_read = True
        except (httpx.HTTPError, TimeoutError, JwksError) as error:
            self._is_read = False
            logger.warning("cannot read the JWKS, its previous keys remain in use: %.200r", error)
        finally:
            self._fetched_at = self._monotonic()


def _version(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise JwksError(f"The JWKS file {path} cannot be read: {error.strerror}.") from error
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _read(path: Path) -> Mapping[str, jwt.PyJWK]:
    try:
        return _usable(path.read_bytes(), f"The JWKS file {path}")
    except OSError as error:
        raise JwksError(f"The JWKS file {path} cannot be read: {error.strerror}.") from error


def _usable(content: bytes, source: str) -> Mapping[str, jwt.PyJWK]:
    """Return the signature keys of a JWKS. Raises JwksError if it has none."""
    try:
        document = msgspec.json.decode(content, type=dict[str, list[dict[str, Any]]])
    except ValueError as error:
        raise JwksError(f"{source} is not a JSON Web Key Set.") from error
    keys = {key.key_id: key for key in map(_parse, document.get("keys", [])) if key is not None}
    usable = {kid: key for kid, key in keys.items() if isinstance(kid, str)}
    if not usable:
        raise JwksError(f"{source} contains no signature key with a 'kid'.")
    return usable


def _parse(data: dict[str, Any]) -> jwt.PyJWK | None:
    if data.get("use", "sig") != "sig":
        return None
    try:
        return jwt.PyJWK.from_dict(data)
    except jwt.PyJWTError:
        # A set may contain key types that we do not support. Their text may be private, so it is
        # not logged.
        logger.warning("JWKS: skipped an unusable key")
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClaims:
    """Claims of a valid token."""

    tenant_id: str
    subject: str
    scopes: frozenset[Scope]
    """Tenant scopes only, since a tenant's issuer sets them."""
    operator_scopes: frozenset[Scope]
    """Scopes from the claim that the deployment maps to operator rights."""
    names_scopes: bool
    """Whether the token names scopes."""
    allowed_models: frozenset[str] | None
    dialect: Dialect | None
    project_id: str | None
    role: Role | None
    """The role that the token's groups give in the tenant."""


class JwtVerifier:
    """Verifies tokens: signature, algorithm, issuer, audience and expiry; reads their claims."""

    def __init__(self, settings: Settings) -> None:
        """Read the JWKS file of the settings, which accept some algorithm."""
        self._settings = settings
        secret, jwks, url = settings.jwt_secret, settings.jwt_jwks_file, settings.jwt_jwks_url
        self._published = None if url is None else JwksUrl(url)
        self._secret = "" if secret is None else secret.get_secret_value()
        self._jwks = self._published if jwks is None else JwksFile(jwks)
        self._operator_values = {
            value: scope
            for value, scope in (
                (settings.jwt_operator_reader_value, Scope.ADMIN_READ),
                (settings.jwt_operator_value, Scope.ADMIN),
            )
            if value is not None
        }
        """The operator right that each value of the operators' claim grants."""

    @classmethod
    def from_settings(cls, settings: Settings) -> "JwtVerifier | None":
        """Create the verifier that the settings define; None if no algorithm is accepted."""
        is_complete = settings.jwt_algorithms and settings.jwt_issuer and settings.jwt_audience
        return cls(settings) if is_complete else None

    async def prepare(self, token: str) -> None:
        """Read the issuer's keys if `verify` needs them. Raises ServiceUnavailableError."""
        if self._published is not None:
            with suppress(jwt.PyJWTError):  # `verify` raises it.
                header = jwt.get_unverified_header(token)
                if header.get("alg") != JwtAlgorithm.HS256:
                    await self._published.refresh(str(header.get("kid")))

    async def require_keys(self) -> None:
        """Read the issuer's keys if it publishes them. Raises ServiceUnavailableError."""
        if self._published is not None:
            await self._published.refresh("")

    def verify(self, token: str) -> TokenClaims:
        """Return the claims, or raise AuthenticationError or ExpiredCredentialError."""
        try:
            header = jwt.get_unverified_header(token)
            algorithm = self._algorithm(header)
            claims = _JWT.decode(
                token,
                self._key(algorithm, header),
                algorithms=[algorithm],
                audience=self._settings.jwt_audience,
                issuer=self._settings.jwt_issuer,
                leeway=self._settings.jwt_leeway,
            )
        except jwt.PyJWTError as error:
            raise _refusal(error) from None
        return self._read_claims(claims)

    def _algorithm(self, header: Mapping[str, Any]) -> JwtAlgorithm:
        for algorithm in self._settings.jwt_algorithms:
            if header.get("alg") == algorithm:
                return algorithm
        accepted = ", ".join(sorted(self._settings.jwt_algorithms))
        raise AuthenticationError(
            f"The token's algorithm {shown(header.get('alg'))} is not accepted. "
            f"Accepted: {accepted}."
        )

    def _key(self, algorithm: JwtAlgorithm, header: Mapping[str, Any]) -> jwt.PyJWK | str:
        if algorithm is JwtAlgorithm.HS256:
            # The secret is only used for HS256, and a public key never is. Otherwise anybody could
            # sign with a published key.
            return self._secret
        kid = header.get("kid")
        if not isinstance(kid, str):
            raise AuthenticationError("The token's header lacks 'kid', which names its key.")
        key = None if self._jwks is None else self._jwks.get(kid)
        if key is None:
            raise AuthenticationError(f"The token's key {shown(kid)} is unknown.")
        if key.key_type != _KEY_TYPES[algorithm]:
            raise AuthenticationError(
                f"The token's key {shown(kid)} is of type {key.key_type}, "
                f"which does not match the algorithm {algorithm}."
            )
        return key

    def _read_claims(self, claims: Mapping[str, Any]) -> TokenClaims:
        tenant_id = _claim(claims, self._settings.jwt_tenant_claim, str)
        return TokenClaims(
            tenant_id=tenant_id,
            subject=subject_of(claims),
            scopes=_scopes(claims),
            operator_scopes=self._operator_scopes(claims),
            names_scopes=any(name in claims for name in SCOPE_CLAIMS),
            allowed_models=(
                frozenset(_claim(claims, "models", list[str])) if "models" in claims else None
            ),
            dialect=_dialect(claims),
            project_id=_claim(claims, "project", str) if "project" in claims else None,
            role=self._role(claims, tenant_id),
        )

    def _role(self, claims: Mapping[str, Any], tenant_id: str) -> Role | None:
        claim, roles = self._settings.jwt_role_claim, self._settings.oidc_roles
        if claim is None or claim not in claims:
            return None
        found = _claim(claims, claim, str | list[str])
        groups = [found] if isinstance(found, str) else found
        given = (roles.get(group, {}).get(tenant_id) for group in groups)
        return Role.most_of(filter(None, given))

    def _operator_scopes(self, claims: Mapping[str, Any]) -> frozenset[Scope]:
        claim = self._settings.jwt_operator_claim
        if claim is None:
            return frozenset()
        found = claims.get(claim)
        values = found if isinstance(found, list) else [found]
        return frozenset(scope for value, scope in self._operator_values.items() if value in values)


def subject_of(claims: Mapping[str, Any]) -> str:
    """Return the claim `sub`; empty without one. Raises AuthenticationError."""
    if "sub" not in claims:
        return ""
    subject: str = _claim(claims, "sub", str)
    if len(subject) > MAX_SUBJECT_CHARACTERS:
        raise AuthenticationError(
            f'The token\'s claim "sub" must have at most {MAX_SUBJECT_CHARACTERS} characters. '
            f"Given: {len(subject)}."
        )
    return subject


def _scopes(claims: Mapping[str, Any]) -> frozenset[Scope]:
    """Return the scopes that every claim of rights names; the default if the token has none."""
    named = [_claim(claims, name, str | list[str]) for name in SCOPE_CLAIMS if name in claims]
    if not named:
        return DEFAULT_SCOPES
    # An identity provider may put scopes of other services into the same claim.
    words = [(each if isinstance(each, str) else " ".join(each)).split() for each in named]
    return frozenset(scope for scope in TENANT_SCOPES if all(scope in each for each in words))


def _dialect(claims: Mapping[str, Any]) -> Dialect | None:
    if "dialect" not in claims:
        return None
    name = _claim(claims, "dialect", str)
    if name not in set(Dialect):
        raise AuthenticationError(
            f'The token\'s claim "dialect" must be one of {", ".join(Dialect)}. '
            f"Given: {shown(name)}."
        )
    return Dialect(name)


def _claim(claims: Mapping[str, Any], name: str, kind: Any) -> Any:
    if name not in claims:
        raise AuthenticationError(f"The token lacks the claim {shown(name)}.")
    try:
        value = msgspec.convert(claims[name], kind)
    except msgspec.ValidationError as error:
        raise AuthenticationError(
            f"The token's claim {shown(name)} must be {_WANTED[kind]}."
        ) from error
    if not all(map(is_storable, [value] if isinstance(value, str) else value)):
        raise AuthenticationError(
            f"The token's claim {shown(name)} must not contain control characters or "
            "lone surrogates."
        )
    return value


def _refusal(error: jwt.PyJWTError) -> AuthenticationError:
    if isinstance(error, jwt.ExpiredSignatureError):
        return ExpiredCredentialError("The token has expired.")
    if isinstance(error, jwt.MissingRequiredClaimError):
        return AuthenticationError(f"The token lacks the claim {shown(error.claim)}.")
    return AuthenticationError(_REFUSALS.get(type(error), "The token is not a valid JWT."))
