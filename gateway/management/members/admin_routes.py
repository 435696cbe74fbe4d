"""Members of any tenant, for operators: `/admin/tenants/{tenant_id}/members`."""

from fastapi import APIRouter

from gateway.database.paging import PageRequest
from gateway.http.authorization import CanAdminister, CanSeeEverything
from gateway.http.bounded_route import BoundedRoute
from gateway.management.members.routes import MemberId, Members
from gateway.management.members.schemas import (
    MemberAddition,
    MemberBody,
    MemberChange,
    MemberList,
    RemovedMember,
)
from gateway.management.shared.parameters import AfterId, PageSize
from gateway.management.tenants.admin_routes import TenantId

router = APIRouter(
    prefix="/tenants/{tenant_id}/members", tags=["Members"], route_class=BoundedRoute
)


@router.get("", summary="List a tenant's members")
async def list_members(
    members: Members,
    _principal: CanSeeEverything,
    tenant_id: TenantId,
    after: AfterId = None,
    limit: PageSize = 20,
) -> MemberList:
    """List members, oldest first."""
    return MemberList.of(await members.page(tenant_id, PageRequest(after, limit)))


@router.post("", summary="Add a member to a tenant")
async def add_member(
    members: Members, principal: CanAdminister, tenant_id: TenantId, body: MemberAddition
) -> MemberBody:
    """Add a member. This is how a tenant gets its first owner."""
    return MemberBody.of(await members.add(tenant_id, **body.given(), actor=principal.actor))


@router.get("/{member_id}", summary="Get a tenant's member")
async def get_member(
    members: Members, _principal: CanSeeEverything, tenant_id: TenantId, member_id: MemberId
) -> MemberBody:
    """Get a member with the role."""
    return MemberBody.of(await members.get(tenant_id, member_id))


@router.patch("/{member_id}", summary="Change the role of a tenant's member")
async def change_member(
    members: Members,
    principal: CanAdminister,
    tenant_id: TenantId,
    member_id: MemberId,
    body: MemberChange,
) -> MemberBody:
    """Change the role of a member. The role of the last owner cannot change."""
    changed = await members.set_role(tenant_id, member_id, role=body.role, actor=principal.actor)
    return MemberBody.of(changed)


@router.delete("/{member_id}", summary="Remove a tenant's member")
async def remove_member(
    members: Members, principal: CanAdminister, tenant_id: TenantId, member_id: MemberId
) -> RemovedMember:
    """Remove a member. The last owner cannot be removed."""
    removed = await members.remove(tenant_id, member_id, actor=principal.actor)
    return RemovedMember(id=removed.id)
