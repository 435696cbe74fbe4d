"""Keys of any tenant, for operators: `/admin/tenants/{tenant_id}/keys`."""

from datetime import timedelta

from fastapi import APIRouter

from gateway.database.paging import PageRequest
from gateway.http.authorization import CanAdminister, CanSeeEverything
from gateway.http.bounded_route import BoundedRoute
from gateway.management.keys.routes import KeyId, Keys
from gateway.management.keys.schemas import (
    CreatedKeyBody,
    KeyBody,
    KeyChange,
    KeyCreation,
    KeyList,
    KeyRotation,
)
from gateway.management.shared.parameters import AfterId, PageSize
from gateway.management.tenants.admin_routes import TenantId

router = APIRouter(prefix="/tenants/{tenant_id}/keys", tags=["Keys"], route_class=BoundedRoute)


@router.get("", summary="List a tenant's keys")
async def list_keys(
    keys: Keys,
    _principal: CanSeeEverything,
    tenant_id: TenantId,
    after: AfterId = None,
    limit: PageSize = 20,
) -> KeyList:
    """List keys, oldest first, including revoked keys."""
    return KeyList.of(await keys.page(tenant_id, PageRequest(after, limit)))


@router.post("", summary="Create a key of a tenant")
async def create_key(
    keys: Keys, principal: CanAdminister, tenant_id: TenantId, body: KeyCreation
) -> CreatedKeyBody:
    """Create a key with any scopes. Only this response contains the whole key.

    A key with an operator scope cannot have more rights than the credential of the request.
    """
    created = await keys.create(
        tenant_id, **body.options(), grantor=principal.operator_grant, actor=principal.actor
    )
    return CreatedKeyBody.of_created(created)


@router.get("/{key_id}", summary="Get a tenant's key")
async def get_key(
    keys: Keys, _principal: CanSeeEverything, tenant_id: TenantId, key_id: KeyId
) -> KeyBody:
    """Get a key without its secret."""
    return KeyBody.of(await keys.get(tenant_id, key_id))


@router.patch("/{key_id}", summary="Update a tenant's key")
async def change_key(
    keys: Keys, principal: CanAdminister, tenant_id: TenantId, key_id: KeyId, body: KeyChange
) -> KeyBody:
    """Change the fields that the body contains. All gateways apply the change within a second."""
    changed = await keys.update(
        tenant_id,
        key_id,
        **body.options(),
        grantor=principal.operator_grant,
        actor=principal.actor,
    )
    return KeyBody.of(changed)


@router.post("/{key_id}:rotate", summary="Rotate a tenant's key")
async def rotate_key(
    keys: Keys,
    principal: CanAdminister,
    tenant_id: TenantId,
    key_id: KeyId,
    body: KeyRotation | None = None,
) -> CreatedKeyBody:
    """Replace the secret.

    Id, limits and usage stay. The current secret works for a grace period; an earlier one ends at
    once.
    """
    grace = timedelta(seconds=(body or KeyRotation()).grace_seconds)
    rotated = await keys.rotate(
        tenant_id,
        key_id,
        grace=grace,
        grantor=principal.operator_grant,
        actor=principal.actor,
    )
    return CreatedKeyBody.of_created(rotated)


@router.delete("/{key_id}", summary="Revoke a tenant's key")
async def revoke_key(
    keys: Keys, principal: CanAdminister, tenant_id: TenantId, key_id: KeyId
) -> KeyBody:
    """Revoke the key. All gateways reject it within a second; it stays in the list."""
    return KeyBody.of(await keys.revoke(tenant_id, key_id, actor=principal.actor))
