"""Keys of a tenant.

Tenants have these routes at `/v1/keys`, operators at `/admin/tenants/{tenant_id}/keys`.
"""

from datetime import timedelta
from typing import Annotated, Final

from fastapi import APIRouter, Path, Query

from gateway.accounts.keys.rules import MadeKeys
from gateway.accounts.keys.schemas import (
    CreatedKeyBody,
    KeyBody,
    KeyChange,
    KeyCreation,
    KeyList,
    KeyRotation,
    RevokedKeyBody,
)
from gateway.accounts.keys.service import KeyService
from gateway.accounts.shared.callers import CallerOfTenant, own_tenant
from gateway.accounts.shared.parameters import AfterId, PageSize
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made
from gateway.platform.database.paging import PageRequest
from gateway.records.scopes import Scope

router = APIRouter(prefix="/keys", tags=["Keys"], route_class=BoundedRoute)
authorize_tenant = own_tenant(Scope.KEYS)


Keys = Annotated[KeyService, made(KeyService)]
_MADE_KEYS: Final = (
    "Keys to revoke too: `all` that the key made, and those that these made, and so on; only those "
    "made with its former secret `in_grace`; or `none`."
)
KeyId = Annotated[str, Path(description="Id of the key, or its public prefix.")]


@router.get("", summary="List keys")
async def list_keys(
    keys: Keys, caller: CallerOfTenant, after: AfterId = None, limit: PageSize = 20
) -> KeyList:
    """List keys, oldest first, including revoked keys.

    All routes under `/v1/keys` need the scope `keys`. A project credential sees and manages only
    the keys of its project.
    """
    return KeyList.of(
        await keys.page(caller.tenant_id, PageRequest(after, limit), grantor=caller.grant)
    )


@router.post("", summary="Create a key")
async def create_key(keys: Keys, caller: CallerOfTenant, body: KeyCreation) -> CreatedKeyBody:
    """Create a key. Only this response contains the whole key.

    Project, models, addresses, expiry and limits default to those of the credential of the request.
    A key cannot have more rights than this credential. For operators, both hold only for keys with
    an operator scope.
    """
    created = await keys.create(caller.tenant_id, **body.options(), **caller.key_by)
    return CreatedKeyBody.of_created(created)


@router.get("/{key_id}", summary="Get a key")
async def get_key(keys: Keys, caller: CallerOfTenant, key_id: KeyId) -> KeyBody:
    """Get a key without its secret."""
    return KeyBody.of(await keys.get(caller.tenant_id, key_id, grantor=caller.grant))


@router.patch("/{key_id}", summary="Update a key")
async def change_key(keys: Keys, caller: CallerOfTenant, key_id: KeyId, body: KeyChange) -> KeyBody:
    """Change the fields that the body contains. All gateways apply the change within a second.

    A credential cannot change a key with more rights than its own. A key cannot change its own
    bounds.
    """
    changed = await keys.update(caller.tenant_id, key_id, **body.options(), **caller.key_by)
    return KeyBody.of(changed)


@router.post("/{key_id}:rotate", summary="Rotate a key")
async def rotate_key(
    keys: Keys, caller: CallerOfTenant, key_id: KeyId, body: KeyRotation | None = None
) -> CreatedKeyBody:
    """Replace the secret.

    Id, limits and usage stay. The current secret works for a grace period; an earlier one ends at
    once.
    """
    rotated = await keys.rotate(
        caller.tenant_id,
        key_id,
        grace=timedelta(seconds=(body or KeyRotation()).grace_seconds),
        **caller.key_by,
    )
    return CreatedKeyBody.of_created(rotated)


@router.delete("/{key_id}", summary="Revoke a key")
async def revoke_key(
    keys: Keys,
    caller: CallerOfTenant,
    key_id: KeyId,
    made_keys: Annotated[MadeKeys, Query(description=_MADE_KEYS)] = MadeKeys.IN_GRACE,
) -> RevokedKeyBody:
    """Revoke the key. All gateways reject it within a second; it stays in the list."""
    key, *made = await keys.revoke(caller.tenant_id, key_id, **caller.by, made_keys=made_keys)
    body = KeyBody.of(key).model_dump()
    return RevokedKeyBody(**body, made_keys=[each.id for each in made])
