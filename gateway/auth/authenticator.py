"""Turns an Authorization header into a Principal."""

import hmac
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final

from contract import clock
from gateway.accounts.database import Database
from gateway.accounts.key_store import KeyOwner, KeyStore
from gateway.accounts.records import Tenant, TenantStatus
from gateway.accounts.tenant_store import TenantStore
from gateway.auth.api_key import ApiKey, MalformedKeyError, digest
from gateway.auth.cache import LookupCache
from gateway.auth.jwt_verifier import JwtVerifier
from gateway.auth.principal import Principal
from gateway.errors import AccountSuspendedError, AuthenticationError, ExpiredCredentialError
from gateway.settings import Settings

MAX_CREDENTIAL_CHARACTERS: Final = 8192
"""No key or token is longer; what is longer is not hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownKey:
    principal: Principal
    expires_at_ms: int | None
    is_suspended: bool


class Authenticator:
    """Checks credentials, from memory wherever possible.

    Args:
        database: where keys and tenants are.
        verifier: checks JWTs; None refuses them all.
        ttl_seconds: how long a key or tenant is believed without asking the database.
        max_entries: keys, and tenants of JWTs, that are kept in memory.
    """

    def __init__(
        self,
        database: Database,
        *,
        verifier: JwtVerifier | None,
        ttl_seconds: float,
        max_entries: int,
    ) -> None:
        self._database = database
        self._verifier = verifier
        self._keys = LookupCache[bytes, _KnownKey](
            ttl_seconds=ttl_seconds, max_entries=max_entries, subjects=_subjects_of_key
        )
        self._tenants = LookupCache[str, Tenant](
            ttl_seconds=ttl_seconds, max_entries=max_entries, subjects=_subjects_of_tenant
        )

    @classmethod
    def from_settings(cls, settings: Settings, database: Database) -> "Authenticator":
        """Return the authenticator that the settings ask for; reads the JWKS file."""
        return cls(
            database,
            verifier=JwtVerifier.from_settings(settings),
            ttl_seconds=settings.key_cache_ttl.total_seconds(),
            max_entries=settings.key_cache_size,
        )

    async def authenticate(self, authorization: str | None) -> Principal:
        """Return who the request acts as.

        Raises:
            AuthenticationError: the header is missing or malformed, or the credential is not valid.
            ExpiredCredentialError: the credential was valid once.
            AccountSuspendedError: the credential is valid, but its tenant is suspended.
            StoreUnavailableError: neither memory nor the database can tell.
        """
        credential = _bearer_credential(authorization)
        if credential.count(".") == 2:
            return await self._authenticate_jwt(credential)
        known = self._keys.fresh(digest(credential))
        if known is None:
            known = await self._find_key(_parse_key(credential))
        return _checked(known)

    def forget_key(self, key_id: str) -> None:
        """Ask the database again before this key is believed."""
        self._keys.forget(_key_subject(key_id))

    def forget_tenant(self, tenant_id: str) -> None:
        """Ask the database again before any credential of this tenant is believed."""
        self._keys.forget(_tenant_subject(tenant_id))
        self._tenants.forget(_tenant_subject(tenant_id))

    def expire_all(self) -> None:
        """Ask the database again before any credential is believed."""
        self._keys.expire_all()
        self._tenants.expire_all()

    async def _find_key(self, key: ApiKey) -> _KnownKey:
        known = await self._keys.get(key.digest(), partial(self._load_key, key))
        if known is None:
            raise AuthenticationError("The API key is unknown or has been revoked.")
        return known

    async def _load_key(self, key: ApiKey) -> _KnownKey | None:
        async with self._database.reading() as transaction:
            owner = await KeyStore(transaction).find_owner(key.prefix)
        if owner is None or not hmac.compare_digest(owner.key.digest, key.digest()):
            return None
        return None if owner.key.revoked_at is not None else _known_key(owner)

    async def _authenticate_jwt(self, token: str) -> Principal:
        if self._verifier is None:
            raise AuthenticationError("JWTs are not accepted here. Use an API key (sk-...).")
        claims = self._verifier.verify(token)
        tenant = await self._tenants.get(
            claims.tenant_id, partial(self._load_tenant, claims.tenant_id)
        )
        if tenant is None:
            raise AuthenticationError("The token's tenant does not exist.")
        _check_active(tenant.id, is_suspended=tenant.status is TenantStatus.SUSPENDED)
        return Principal(
            tenant_id=tenant.id,
            tenant_weight=tenant.weight,
            credential_id=f"jwt:{claims.subject}",
            scopes=claims.scopes,
            allowed_models=claims.allowed_models,
            dialect=claims.dialect or tenant.dialect,
            is_strict=tenant.strict_parameters,
            default_model=tenant.default_model,
        )

    async def _load_tenant(self, tenant_id: str) -> Tenant | None:
        async with self._database.reading() as transaction:
            return await TenantStore(transaction).get(tenant_id)


def _bearer_credential(authorization: str | None) -> str:
    if not authorization or authorization.isspace():
        raise AuthenticationError(
            "No API key was given. Send it in the header 'Authorization: Bearer YOUR_KEY'."
        )
    scheme, _, credential = authorization.strip().partition(" ")
    if scheme.lower() != "bearer":
        raise AuthenticationError(
            "The Authorization header does not use the scheme Bearer. "
            "Send 'Authorization: Bearer YOUR_KEY'."
        )
    credential = credential.strip()
    if not 0 < len(credential) <= MAX_CREDENTIAL_CHARACTERS:
        raise AuthenticationError(
            "The Authorization header carries no API key after 'Bearer', or one that is too long."
        )
    return credential


def _parse_key(credential: str) -> ApiKey:
    try:
        return ApiKey.parse(credential)
    except MalformedKeyError as error:
        raise AuthenticationError(
            f"The API key is malformed: {error}. Check that it was copied whole."
        ) from None


def _known_key(owner: KeyOwner) -> _KnownKey:
    key, tenant = owner
    expires_at = key.expires_at
    return _KnownKey(
        principal=Principal(
            tenant_id=tenant.id,
            tenant_weight=tenant.weight,
            credential_id=key.id,
            scopes=key.scopes,
            allowed_models=key.allowed_models,
            dialect=key.dialect or tenant.dialect,
            is_strict=tenant.strict_parameters,
            default_model=tenant.default_model,
        ),
        expires_at_ms=None if expires_at is None else int(expires_at.timestamp() * 1000),
        is_suspended=tenant.status is TenantStatus.SUSPENDED,
    )


def _checked(known: _KnownKey) -> Principal:
    if known.expires_at_ms is not None and clock.now_ms() >= known.expires_at_ms:
        expired_at = datetime.fromtimestamp(known.expires_at_ms / 1000, UTC)
        raise ExpiredCredentialError(f"The API key expired at {expired_at:%Y-%m-%d %H:%M:%S} UTC.")
    _check_active(known.principal.tenant_id, is_suspended=known.is_suspended)
    return known.principal


def _check_active(tenant_id: str, *, is_suspended: bool) -> None:
    if is_suspended:
        raise AccountSuspendedError(f"The account '{tenant_id}' is suspended.")


def _subjects_of_key(known: _KnownKey) -> tuple[str, str]:
    principal = known.principal
    return _key_subject(principal.credential_id), _tenant_subject(principal.tenant_id)


def _subjects_of_tenant(tenant: Tenant) -> tuple[str]:
    return (_tenant_subject(tenant.id),)


def _key_subject(key_id: str) -> str:
    return f"key:{key_id}"


def _tenant_subject(tenant_id: str) -> str:
    return f"tenant:{tenant_id}"
