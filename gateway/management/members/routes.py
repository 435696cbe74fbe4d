"""Members of the caller's tenant and their roles: `/v1/members`."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path

from gateway.database.paging import PageRequest
from gateway.http.authorization import CanManageMembers, Context
from gateway.http.bounded_route import BoundedRoute
from gateway.management.members.schemas import (
    MemberAddition,
    MemberBody,
    MemberChange,
    MemberList,
    RemovedMember,
)
from gateway.management.members.service import MemberService
from gateway.management.shared.parameters import AfterId, PageSize

router = APIRouter(prefix="/v1/members", tags=["Members"], route_class=BoundedRoute)


def member_service(context: Context) -> MemberService:
    """Return the member service."""
    return MemberService(context.database, context.announcer)


Members = Annotated[MemberService, Depends(member_service)]
MemberId = Annotated[str, Path(description="Id of the member, or the `sub` claim of its tokens.")]


@router.get("", summary="List your members")
async def list_members(
    members: Members, principal: CanManageMembers, after: AfterId = None, limit: PageSize = 20
) -> MemberList:
    """List members, oldest first. All routes under `/v1/members` need the scope `members`."""
    return MemberList.of(await members.page(principal.tenant_id, PageRequest(after, limit)))


@router.post("", summary="Add a member")
async def add_member(
    members: Members, principal: CanManageMembers, body: MemberAddition
) -> MemberBody:
    """Add a member.

    The role decides what the person's tokens may do, unless a token asks for less.
    """
    added = await members.add(
        principal.tenant_id,
        **body.given(),
        grantor=principal.grant,
        actor=principal.actor,
    )
    return MemberBody.of(added)


@router.get("/{member_id}", summary="Get a member")
async def get_member(
    members: Members, principal: CanManageMembers, member_id: MemberId
) -> MemberBody:
    """Get a member with the role."""
    return MemberBody.of(await members.get(principal.tenant_id, member_id))


@router.patch("/{member_id}", summary="Change the role of a member")
async def change_member(
    members: Members, principal: CanManageMembers, member_id: MemberId, body: MemberChange
) -> MemberBody:
    """Change the role of a member. The role of the last owner cannot change."""
    changed = await members.set_role(
        principal.tenant_id,
        member_id,
        role=body.role,
        grantor=principal.grant,
        actor=principal.actor,
    )
    return MemberBody.of(changed)


@router.delete("/{member_id}", summary="Remove a member")
async def remove_member(
    members: Members, principal: CanManageMembers, member_id: MemberId
) -> RemovedMember:
    """Remove a member. The last owner cannot be removed."""
    removed = await members.remove(
        principal.tenant_id,
        member_id,
        grantor=principal.grant,
        actor=principal.actor,
    )
    return RemovedMember(id=removed.id)
