"""`/v1/keys`: a tenant's own keys."""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Path

from gateway.accounts.paging import PageRequest
from gateway.api.bounded_route import BoundedRoute
from gateway.api.call import CanManageKeys, Context
from gateway.api.key_bodies import (
    CreatedKeyBody,
    KeyBody,
    KeyChange,
    KeyCreation,
    KeyList,
    KeyRotation,
)
from gateway.api.parameters import AfterId, PageSize
from gateway.auth.key_service import KeyService

router = APIRouter(prefix="/v1/keys", tags=["Keys"], route_class=BoundedRoute)


def key_service(context: Context) -> KeyService:
    """Return the rules of keys."""
    return KeyService(context.database, context.announcer)


Keys = Annotated[KeyService, Depends(key_service)]
KeyId = Annotated[str, Path(description="Id of the key, or its public prefix.")]


@router.get("", summary="List your keys")
async def list_keys(
    keys: Keys, principal: CanManageKeys, after: AfterId = None, limit: PageSize = 20
) -> KeyList:
    """Oldest first, the revoked ones included. Needs the scope `keys`, like all of this.

    A credential of a project sees and manages the keys of this project only.
    """
    return KeyList.of(
        await keys.page(principal.tenant_id, PageRequest(after, limit), grantor=principal.grant)
    )


@router.post("", summary="Make a key")
async def create_key(keys: Keys, principal: CanManageKeys, body: KeyCreation) -> CreatedKeyBody:
    """The whole key is shown here and never again.

    Project, models, addresses, expiry and limits that are not named are those of the credential that asks. More
    than it has itself is refused.
    """
    created = await keys.create(
        principal.tenant_id, **body.options(), grantor=principal.grant, actor=principal.actor
    )
    return CreatedKeyBody.of_created(created)


@router.get("/{key_id}", summary="Describe a key")
async def get_key(keys: Keys, principal: CanManageKeys, key_id: KeyId) -> KeyBody:
    """Without its secret."""
    return KeyBody.of(await keys.get(principal.tenant_id, key_id, grantor=principal.grant))


@router.patch("/{key_id}", summary="Change a key")
async def change_key(
    keys: Keys, principal: CanManageKeys, key_id: KeyId, body: KeyChange
) -> KeyBody:
    """What the body does not name stays as it is. All gateways know of it within a second.

    A key with more rights than the credential that asks is out of its reach, and so are its own bounds.
    """
    changed = await keys.update(
        principal.tenant_id,
        key_id,
        **body.options(),
        grantor=principal.grant,
        actor=principal.actor,
    )
    return KeyBody.of(changed)


@router.post("/{key_id}:rotate", summary="Give a key a new secret")
async def rotate_key(
    keys: Keys, principal: CanManageKeys, key_id: KeyId, body: KeyRotation | None = None
) -> CreatedKeyBody:
    """Id, limits and usage stay. The present secret works for a grace period; one before it ends at once."""
    rotated = await keys.rotate(
        principal.tenant_id,
        key_id,
        grace=timedelta(seconds=(body or KeyRotation()).grace_seconds),
        grantor=principal.grant,
        actor=principal.actor,
    )
    return CreatedKeyBody.of_created(rotated)


@router.delete("/{key_id}", summary="Revoke a key")
async def revoke_key(keys: Keys, principal: CanManageKeys, key_id: KeyId) -> KeyBody:
    """It is refused by all gateways within a second, and stays in the list."""
    revoked = await keys.revoke(
        principal.tenant_id, key_id, grantor=principal.grant, actor=principal.actor
    )
    return KeyBody.of(revoked)
