"""Keys of a tenant.

Tenants have these routes at `/v1/keys`, operators at `/admin/tenants/{tenant_id}/keys`.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal, Self

from fastapi import Path, Query
from pydantic import AwareDatetime, BeforeValidator, Field
from typing_extensions import override

from contract.dialect import Dialect
from gateway.accounts.keys.rules import (
    DEFAULT_GRACE,
    MAX_ADDRESSES,
    MAX_ALLOWED_MODELS,
    MAX_GRACE,
    MadeKeys,
    read_addresses,
)
from gateway.accounts.keys.service import CreatedKey, KeyService
from gateway.accounts.routes_common import (
    BodyWithLimits,
    ChangeBody,
    LimitsShown,
    ListBody,
    Name,
    OfTenant,
    RecordBody,
    RequestBody,
    TenantRouter,
    WantedPage,
    own_tenant,
)
from gateway.http.services import made
from gateway.platform.database.paging import Page
from gateway.records.records import KeyRecord
from gateway.records.scopes import Scope

Scopes = Annotated[
    list[Scope],
    Field(
        min_length=1,
        max_length=2 * len(Scope),
        description="Scopes of the key. Default of a new key: `completions`.",
    ),
]


KeyName = Annotated[Name, Field(description="Name of the key.")]


class _KeyOptions(BodyWithLimits):
    scopes: Scopes = Field(default_factory=lambda: [Scope.COMPLETIONS])
    allowed_models: list[Name] | None = Field(
        None,
        min_length=1,
        max_length=MAX_ALLOWED_MODELS,
        description="Models that the key may use; null: all.",
    )
    allowed_addresses: list[Annotated[str, Field(max_length=100)]] | None = Field(
        None,
        min_length=1,
        max_length=MAX_ADDRESSES,
        description="Addresses and networks that may use the key; null: any.",
        examples=[["192.0.2.7", "10.0.0.0/8", "2001:db8::/32"]],
    )
    expires_at: AwareDatetime | None = Field(None, description="Expiry of the key; null: never.")
    dialect: Dialect | None = Field(
        None,
        description="Dialect of requests that specify none; null: the tenant's dialect.",
    )

    @override
    def options(self) -> dict[str, Any]:
        """Return the arguments for the service. Raises InvalidParameterError."""
        options = super().options()
        if options.get("allowed_addresses") is not None:
            options["allowed_addresses"] = read_addresses(options["allowed_addresses"])
        if options.get("allowed_models") is not None:
            options["allowed_models"] = frozenset(options["allowed_models"])
        if "scopes" in options:
            options["scopes"] = frozenset(options["scopes"])
        return options


class KeyCreation(_KeyOptions):
    """A key to create."""

    name: KeyName
    project_id: str | None = Field(
        None, max_length=63, description="Project of the key, by its id."
    )


class KeyChange(ChangeBody, _KeyOptions):
    """Changes to a key; absent fields stay unchanged."""

    name: KeyName = ""


_MADE_KEYS: Final = (
    "Keys to revoke too: `all` that the key made, and those that these made, and so on; only those "
    "made with its former secret `in_grace`; or `none`."
)


class KeyRotation(RequestBody):
    """Options of a key rotation."""

    grace_seconds: int = Field(
        int(DEFAULT_GRACE.total_seconds()),
        strict=True,
        ge=0,
        le=int(MAX_GRACE.total_seconds()),
        description="How long the current secret remains valid.",
    )
    made_keys: MadeKeys = Field(MadeKeys.IN_GRACE, description=_MADE_KEYS)


def _sorted(values: Iterable[str] | None) -> list[str] | None:
    return None if values is None else sorted(values)


def _texts(values: Iterable[object] | None) -> list[str] | None:
    return None if values is None else list(map(str, values))


class KeyBody(RecordBody):
    """A key, without its secret."""

    object: Literal["key"] = "key"
    id: str
    tenant_id: str
    project_id: str | None
    prefix: str = Field(description="The public part of the key: `sk-PREFIX-...`.")
    name: str
    scopes: Annotated[list[Scope], BeforeValidator(sorted)]
    allowed_models: Annotated[list[str] | None, BeforeValidator(_sorted)] = Field(
        description="Null: all models."
    )
    allowed_addresses: Annotated[list[str] | None, BeforeValidator(_texts)] = Field(
        description="Null: any address."
    )
    dialect: Dialect | None
    limits: LimitsShown
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    old_prefix: str | None = Field(description="Prefix of the previous secret, after a rotation.")
    old_expires_at: datetime | None = Field(description="Expiry of the previous secret.")


class CreatedKeyBody(KeyBody):
    """A key with its new secret."""

    key: str = Field(description="The complete key. Store it: it cannot be shown again.")

    @classmethod
    def of_created(cls, created: CreatedKey) -> Self:
        """Return the response body of a new key, the only one with its secret."""
        return cls(**KeyBody.of(created.record).model_dump(), key=created.key.reveal())


class RevokedKeyBody(KeyBody):
    """A revoked key."""

    made_keys: list[str] = Field(description="Ids of the keys that it made and that end with it.")


router = TenantRouter("/keys", "Keys", own_tenant(Scope.KEYS))


Keys = Annotated[KeyService, made(KeyService)]
KeyId = Annotated[str, Path(description="Id of the key, or its public prefix.")]


@router.get("", summary="List keys", response_model=ListBody[KeyBody])
async def list_keys(keys: Keys, caller: OfTenant, wanted: WantedPage) -> Page[KeyRecord]:
    """List keys, oldest first, including revoked keys.

    All routes under `/v1/keys` need the scope `keys`. A project credential sees and manages only
    the keys of its project.
    """
    return await keys.page(caller.tenant_id, wanted, grantor=caller.grant)


@router.post("", summary="Create a key")
async def create_key(keys: Keys, caller: OfTenant, body: KeyCreation) -> CreatedKeyBody:
    """Create a key. Only this response contains the whole key.

    Project, models, addresses, expiry and limits default to those of the credential of the request.
    A key cannot have more rights than this credential. For operators, both hold only for keys with
    an operator scope.
    """
    created = await keys.create(caller.tenant_id, **body.options(), **caller.key_by)
    return CreatedKeyBody.of_created(created)


@router.get("/{key_id}", summary="Get a key", response_model=KeyBody)
async def get_key(keys: Keys, caller: OfTenant, key_id: KeyId) -> KeyRecord:
    """Get a key without its secret."""
    return await keys.get(caller.tenant_id, key_id, grantor=caller.grant)


@router.patch("/{key_id}", summary="Update a key", response_model=KeyBody)
async def change_key(keys: Keys, caller: OfTenant, key_id: KeyId, body: KeyChange) -> KeyRecord:
    """Change the given fields. All gateways apply the change within a second.

    A credential cannot change a key with more rights than its own. A key cannot change its own
    bounds.
    """
    return await keys.update(caller.tenant_id, key_id, **body.options(), **caller.key_by)


@router.post("/{key_id}:rotate", summary="Rotate a key")
async def rotate_key(
    keys: Keys, caller: OfTenant, key_id: KeyId, body: KeyRotation | None = None
) -> CreatedKeyBody:
    """Replace the secret.

    Id, limits and usage stay. The current secret works for a grace period; an earlier one ends at
    once. If the current one was stolen, let it end too, with `all` keys that the key made.
    """
    options = body or KeyRotation()
    rotated = await keys.rotate(
        caller.tenant_id,
        key_id,
        grace=timedelta(seconds=options.grace_seconds),
        made_keys=options.made_keys,
        **caller.key_by,
    )
    return CreatedKeyBody.of_created(rotated)


@router.delete("/{key_id}", summary="Revoke a key")
async def revoke_key(
    keys: Keys,
    caller: OfTenant,
    key_id: KeyId,
    made_keys: Annotated[MadeKeys, Query(description=_MADE_KEYS)] = MadeKeys.IN_GRACE,
) -> RevokedKeyBody:
    """Revoke the key. All gateways reject it within a second; it stays in the list."""
    key, *made = await keys.revoke(caller.tenant_id, key_id, **caller.by, made_keys=made_keys)
    body = KeyBody.of(key).model_dump()
    return RevokedKeyBody(**body, made_keys=[each.id for each in made])
