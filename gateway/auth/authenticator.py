"""Authenticate requests: map an Authorization header to a Principal."""

import hmac
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any, Final

from common import clock
from gateway.auth.api_key import ApiKey, MalformedKeyError, digest
from gateway.auth.cache import LookupCache
from gateway.auth.jwt_verifier import JwtVerifier, TokenClaims
from gateway.auth.store import (
    KeyOwner,
    TenantMember,
    find_caller,
    find_origins,
    find_owner,
)
from gateway.platform.database.engine import Database
from gateway.platform.settings import Settings
from gateway.records.checks import allows_origin
from gateway.records.errors import (
    AccountSuspendedError,
    AuthenticationError,
    ExpiredCredentialError,
    PermissionDeniedError,
    shown,
)
from gateway.records.limits import JWT_PREFIX, Limits, LimitScope, SubjectLimits, Subjects
from gateway.records.principal import Principal
from gateway.records.records import (
    Billing,
    KeyRecord,
    Person,
    Plan,
    Project,
    ProjectStatus,
    Tenant,
    TenantStatus,
)
from gateway.records.scopes import ROLE_SCOPES, Role, Scope
from gateway.records.times import to_ms

MAX_CREDENTIAL_CHARACTERS: Final = 8192
"""Longer credentials are rejected without hashing, since no valid key or token is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownKey:
    principal: Principal
    expires_at_ms: int | None
    refusal: str


class Authenticator:
    """Authenticates credentials, from the in-memory cache where possible.

    Args:
        database: stores keys and tenants.
        verifier: verifies JWTs; None rejects all of them.
        member_issuer: the issuer of JWTs, and of members that were added without an issuer.
        role_claim: the claim of JWTs with groups that give roles.
        group_tenants: the tenants in which groups give roles.
        ttl_seconds: how long a cached key or tenant is valid without a database query.
        max_entries: maximum number of cached keys, and of cached tenants of JWTs.
    """

    def __init__(
        self,
        database: Database,
        *,
        verifier: JwtVerifier | None,
        ttl_seconds: float,
        max_entries: int,
        member_issuer: str | None = None,
        role_claim: str | None = None,
        group_tenants: frozenset[str] = frozenset(),
    ) -> None:
        self._database = database
        self._verifier = verifier
        self._member_issuer = member_issuer
        self._role_claim = role_claim
        self._group_tenants = group_tenants
        bounds: dict[str, Any] = {"ttl_seconds": ttl_seconds, "max_entries": max_entries}
        self._keys = LookupCache[bytes, _KnownKey](**bounds, subjects=_subjects_of_key)
        self._keys_by_id = LookupCache[str, _KnownKey](**bounds, subjects=_subjects_of_key)
        self._callers = LookupCache[tuple[str, Person, str | None], TenantMember](
            **bounds, subjects=lambda caller: (_tenant_subject(caller.tenant.id),)
        )
        self._origins = LookupCache[str, frozenset[str]](
            **bounds | {"max_entries": 1}, subjects=lambda _origins: ()
        )

    @classmethod
    def from_settings(cls, settings: Settings, database: Database) -> "Authenticator":
        """Create the authenticator that the settings define; reads the JWKS file."""
        return cls(
            database,
            verifier=JwtVerifier.from_settings(settings),
            ttl_seconds=settings.key_cache_ttl.total_seconds(),
            max_entries=settings.key_cache_size,
            member_issuer=settings.member_issuer,
            role_claim=settings.jwt_role_claim,
            group_tenants=frozenset(chain.from_iterable(settings.oidc_roles.values())),
        )

    async def authenticate(
        self, authorization: str | None, *, address: str | None = None
    ) -> Principal:
        """Return the principal of a request from the client's IP address.

        Raises:
            AuthenticationError: the header is missing or malformed, or the credential is invalid.
            ExpiredCredentialError: the credential has expired.
            AccountSuspendedError: the credential is valid, but its tenant is suspended or its
                project archived.
            AddressNotAllowedError: the credential does not allow requests from this address.
            StoreUnavailableError: the cache has no usable entry and the database is unavailable.
        """
        credential = _bearer_credential(authorization)
        if credential.count(".") == 2:
            return await self._authenticate_jwt(credential)
        known = self._keys.fresh(digest(credential))
        if known is None:
            key = _parse_key(credential)
            known = await self._find_key(key.prefix, key.digest())
        principal = _checked(known)
        principal.require_address(address)
        return principal

    async def principal_of_digest(
        self, prefix: str, key_digest: bytes, *, address: str | None
    ) -> Principal:
        """Return the principal of a session that began with the key of this prefix and digest.

        Raises the errors of `authenticate`, so that a session ends with its key.
        """
        principal = _checked(await self._find_key(prefix, key_digest))
        principal.require_address(address)
        return principal

    async def principal_of_key(self, key_id: str) -> Principal:
        """Return the principal of a key that a stored task acts for.

        Raises AuthenticationError if the key is revoked, and the other errors of `authenticate`.
        """
        known = await self._keys_by_id.get(key_id, partial(self._load_key_by_id, key_id))
        if known is None:
            raise AuthenticationError("The API key is unknown or has been revoked.")
        return _checked(known)

    async def principal_of_claims(self, claims: TokenClaims) -> Principal:
        """Return the principal of a token that is valid.

        Raises the errors of `authenticate`.
        """
        has_groups = self._role_claim is not None and claims.tenant_id in self._group_tenants
        reason = f" Its claim {shown(self._role_claim)} has no group with a role there."
        caller = await self._caller_of_token(claims)
        return _principal_of_token(claims, caller, reason=reason if has_groups else "")

    async def principal_of_task(self, claims: TokenClaims) -> Principal:
        """Return the principal of a token that was valid when a stored task began.

        Groups cannot be read again: in a tenant in which they give roles, a person who is not a
        member is a developer. Raises the errors of `authenticate`.
        """
        default = Role.DEVELOPER if claims.tenant_id in self._group_tenants else None
        return _principal_of_token(claims, await self._caller_of_token(claims), default=default)

    def person(self, issuer: str | None, subject: str) -> Person:
        """Return the person whom an issuer has authenticated."""
        return Person(issuer, subject, issuer == self._member_issuer)

    async def principal_of_member(
        self, tenant_id: str, person: Person, *, role: Role | None = None
    ) -> Principal:
        """Return the principal of a person in a tenant, with the rights of the role.

        `role` is the one that the identity provider's groups give; else it is the member's.

        Raises AuthenticationError if the person is not a member, and the errors of `authenticate`.
        """
        caller = await self._caller_of(tenant_id, person, project_id=None)
        if role is None and caller.member is not None:
            role = caller.member.role
        if role is None:
            raise AuthenticationError(f"You are not a member of the account '{tenant_id}'.")
        _check(_refusal(caller.tenant, None))
        return _principal_of_caller(caller, subject=person.subject, scopes=ROLE_SCOPES[role])

    def cached_tenant(self, authorization: str | None) -> str | None:
        """Return the tenant of the header's key if the cache has a fresh entry for it.

        Does not query the database.
        """
        try:
            known = self._keys.fresh(digest(_bearer_credential(authorization)))
        except AuthenticationError:
            return None
        return None if known is None else known.principal.tenant_id

    async def allows_origin(self, origin: str) -> bool:
        """Whether any tenant allows web pages of this origin to use its keys.

        Raises StoreUnavailableError like `authenticate`.
        """
        return allows_origin(await self._origins.get("", self._load_origins) or (), origin)

    def drop_key(self, key_id: str) -> None:
        """Drop this key from the cache, so that its next use queries the database."""
        self._drop(_key_subject(key_id))

    def drop_tenant(self, tenant_id: str) -> None:
        """Drop this tenant from the cache; its credentials' next use queries the database."""
        self._drop(_tenant_subject(tenant_id))
        self._origins.expire_all()

    def expire_all(self) -> None:
        """Expire all cache entries, so that their next use queries the database."""
        for cache in (self._keys, self._keys_by_id, self._callers, self._origins):
            cache.expire_all()

    def _drop(self, subject: str) -> None:
        for cache in (self._keys, self._keys_by_id, self._callers):
            cache.drop(subject)

    async def _find_key(self, prefix: str, key_digest: bytes) -> _KnownKey:
        known = await self._keys.get(key_digest, partial(self._load_key, prefix, key_digest))
        if known is None:
            raise AuthenticationError("The API key is unknown or has been revoked.")
        return known

    async def _load_key(self, prefix: str, key_digest: bytes) -> _KnownKey | None:
        async with self._database.reading() as transaction:
            owner = await find_owner(transaction, prefix)
        return None if owner is None else _known_key(owner, key_digest)

    async def _load_key_by_id(self, key_id: str) -> _KnownKey | None:
        async with self._database.reading() as transaction:
            owner = await find_owner(transaction, key_id)
        return None if owner is None else _known(owner, owner.key.expires_at)

    async def _load_origins(self) -> frozenset[str]:
        async with self._database.reading() as transaction:
            return await find_origins(transaction)

    async def _authenticate_jwt(self, token: str) -> Principal:
        if self._verifier is None:
            raise AuthenticationError("JWTs are not accepted. Use an API key (sk-...).")
        await self._verifier.prepare(token)
        return await self.principal_of_claims(self._verifier.verify(token))

    async def _caller_of_token(self, claims: TokenClaims) -> TenantMember:
        person = self.person(self._member_issuer, claims.subject)
        return await self._caller_of(claims.tenant_id, person, project_id=claims.project_id)

    async def _caller_of(
        self, tenant_id: str, person: Person, *, project_id: str | None
    ) -> TenantMember:
        caller = await self._callers.get(
            (tenant_id, person, project_id),
            partial(self._load_caller, tenant_id, person, project_id),
        )
        if caller is None:
            raise AuthenticationError("The token's tenant does not exist.")
        return caller

    async def _load_caller(
        self, tenant_id: str, person: Person, project_id: str | None
    ) -> TenantMember | None:
        async with self._database.reading() as transaction:
            return await find_caller(transaction, tenant_id, person, project_id=project_id)


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
            "The Authorization header contains no API key after 'Bearer', or one that is too long."
        )
    return credential


def _parse_key(credential: str) -> ApiKey:
    try:
        return ApiKey.parse(credential)
    except MalformedKeyError as error:
        raise AuthenticationError(
            f"The API key is malformed: {error}. Check that it was copied completely."
        ) from None


def _known_key(owner: KeyOwner, key_digest: bytes) -> _KnownKey | None:
    """Return the owner of the key, or None if the database has another secret for its prefix."""
    record = owner.key
    expires_at = record.expires_at
    if hmac.compare_digest(record.digest, key_digest):
        pass
    elif hmac.compare_digest(record.old_digest or b"", key_digest):
        ends = [time for time in (expires_at, record.old_expires_at) if time is not None]
        return _known(owner, min(ends), is_former_secret=True)
    else:
        return None
    return _known(owner, expires_at)


def _known(
    owner: KeyOwner, expires_at: datetime | None, *, is_former_secret: bool = False
) -> _KnownKey | None:
    record, tenant = owner.key, owner.tenant
    if record.revoked_at is not None:
        return None
    return _KnownKey(
        principal=_principal(
            tenant,
            credential_id=record.id,
            scopes=record.scopes,
            allowed_models=record.allowed_models,
            dialect=record.dialect or tenant.dialect,
            project_id=record.project_id,
            allowed_addresses=record.allowed_addresses,
            expires_at=expires_at,
            is_former_secret=is_former_secret,
            limits=_limits(owner.tenant, owner.plan, project=owner.project, key=record),
            spend_limits=owner.spend_limits,
        ),
        expires_at_ms=None if expires_at is None else to_ms(expires_at),
        refusal=_refusal(tenant, owner.project),
    )


def _principal_of_token(
    claims: TokenClaims, caller: TenantMember, *, default: Role | None = None, reason: str = ""
) -> Principal:
    """Return the principal of a token.

    `default` is the role of people who are not members. With a `reason`, they are refused.
    """
    tenant, project, member = caller.tenant, caller.project, caller.member
    if claims.project_id is not None and project is None:
        raise AuthenticationError("The token's project does not exist.")
    _check(_refusal(tenant, project))
    role = claims.role or (default if member is None else member.role)
    if role is None and (caller.has_members or reason):
        raise PermissionDeniedError(f"The token's subject is not a member of the account.{reason}")
    scopes = claims.scopes
    if role is not None:
        # Rights of the role, unless the token names fewer scopes.
        granted = ROLE_SCOPES[role]
        scopes = granted & scopes if claims.names_scopes else granted
    principal = _principal_of_caller(
        caller, subject=claims.subject, scopes=scopes | claims.operator_scopes
    )
    return replace(
        principal,
        allowed_models=claims.allowed_models,
        dialect=claims.dialect or tenant.dialect,
    )


def _principal_of_caller(
    caller: TenantMember, *, subject: str, scopes: frozenset[Scope]
) -> Principal:
    tenant, project = caller.tenant, caller.project
    return _principal(
        tenant,
        credential_id=f"{JWT_PREFIX}{subject}",
        scopes=scopes,
        allowed_models=None,
        dialect=tenant.dialect,
        project_id=None if project is None else project.id,
        limits=_limits(tenant, caller.plan, project=project, key=None),
        spend_limits=caller.spend_limits,
    )


def _principal(tenant: Tenant, **others: Any) -> Principal:
    """Return a principal with the options of its tenant."""
    return Principal(
        tenant_id=tenant.id,
        tenant_weight=tenant.weight,
        is_strict=tenant.strict_parameters,
        default_model=tenant.default_model,
        is_prepaid=tenant.billing is Billing.PREPAID,
        service_tier=tenant.service_tier,
        shows_cost=tenant.shows_cost,
        zero_retention=tenant.zero_retention,
        prompt_log=tenant.prompt_log,
        cors_origins=tenant.cors_origins,
        **others,
    )


def _limits(
    tenant: Tenant, plan: Plan | None, *, project: Project | None, key: KeyRecord | None
) -> tuple[SubjectLimits, ...]:
    holders = (
        (LimitScope.KEY, key),
        (LimitScope.PROJECT, project),
        (LimitScope.TENANT, tenant),
    )
    return Subjects(
        SubjectLimits(
            scope, holder.id, Limits.from_values(holder.limits, plan.limits[scope] if plan else {})
        )
        for scope, holder in holders
        if holder is not None
    )


def _refusal(tenant: Tenant, project: Project | None) -> str:
    """Return why the tenant or project is not served; empty if it is served."""
    if tenant.status is TenantStatus.SUSPENDED:
        return f"The account '{tenant.id}' is suspended."
    if project is not None and project.status is ProjectStatus.ARCHIVED:
        return f"The project '{project.id}' is archived."
    return ""


def _checked(known: _KnownKey) -> Principal:
    if known.expires_at_ms is not None and clock.now_ms() >= known.expires_at_ms:
        expired_at = datetime.fromtimestamp(known.expires_at_ms / 1000, UTC)
        error = ExpiredCredentialError(
            f"The API key expired at {expired_at:%Y-%m-%d %H:%M:%S} UTC."
        )
        error.principal = known.principal
        raise error
    _check(known.refusal)
    return known.principal


def _check(refusal: str) -> None:
    if refusal:
        raise AccountSuspendedError(refusal)


def _subjects_of_key(known: _KnownKey) -> tuple[str, str]:
    principal = known.principal
    return _key_subject(principal.credential_id), _tenant_subject(principal.tenant_id)


def _key_subject(key_id: str) -> str:
    return f"key:{key_id}"


def _tenant_subject(tenant_id: str) -> str:
    return f"tenant:{tenant_id}"
