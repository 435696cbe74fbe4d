"""Members of a tenant and their roles.

Tenants have these routes at `/v1/members`, operators at `/admin/tenants/{tenant_id}/members`.
"""

from typing import Annotated

from fastapi import APIRouter, Path

from gateway.accounts.members.schemas import (
    MemberAddition,
    MemberBody,
    MemberChange,
    MemberList,
    RemovedMember,
)
from gateway.accounts.members.service import MemberService
from gateway.accounts.shared.callers import CallerOfTenant, own_tenant
from gateway.accounts.shared.parameters import AfterId, PageSize
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made
from gateway.platform.database.paging import PageRequest
from gateway.records.scopes import Scope

router = APIRouter(prefix="/members", tags=["Members"], route_class=BoundedRoute)
authorize_tenant = own_tenant(Scope.MEMBERS, of_tenant=True)


Members = Annotated[MemberService, made(MemberService)]
MemberId = Annotated[str, Path(description="Id, subject or e-mail of the member.")]


@router.get("", summary="List members")
async def list_members(
    members: Members, caller: CallerOfTenant, after: AfterId = None, limit: PageSize = 20
) -> MemberList:
    """List members, oldest first. All routes under `/v1/members` need the scope `members`."""
    return MemberList.of(await members.page(caller.tenant_id, PageRequest(after, limit)))


@router.post("", summary="Add a member")
async def add_member(members: Members, caller: CallerOfTenant, body: MemberAddition) -> MemberBody:
    """Add a member. Operators add the first owner of a tenant.

    The role decides what the person's tokens may do, unless a token asks for less.
    """
    added = await members.add(caller.tenant_id, **body.given(), **caller.by)
    return MemberBody.of(added)


@router.get("/{member_id:path}", summary="Get a member")
async def get_member(members: Members, caller: CallerOfTenant, member_id: MemberId) -> MemberBody:
    """Get a member with the role."""
    return MemberBody.of(await members.get(caller.tenant_id, member_id))


@router.patch("/{member_id:path}", summary="Change the role of a member")
async def change_member(
    members: Members, caller: CallerOfTenant, member_id: MemberId, body: MemberChange
) -> MemberBody:
    """Change the role of a member. The role of the last owner cannot change."""
    changed = await members.set_role(caller.tenant_id, member_id, role=body.role, **caller.by)
    return MemberBody.of(changed)


@router.delete("/{member_id:path}", summary="Remove a member")
async def remove_member(
    members: Members, caller: CallerOfTenant, member_id: MemberId
) -> RemovedMember:
    """Remove a member. The last owner cannot be removed."""
    removed = await members.remove(caller.tenant_id, member_id, **caller.by)
    return RemovedMember(id=removed.id)
