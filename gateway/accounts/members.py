"""Members of a tenant and their roles: add, change and remove.

Tenants have these routes at `/v1/members`, operators at `/admin/tenants/{tenant_id}/members`.
"""

import secrets
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime
from typing import Annotated, Literal, Unpack

from fastapi import Path
from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement, and_, delete, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from gateway.accounts.changes import By, Service, changing, require_room
from gateway.accounts.routes_common import (
    ListBody,
    Name,
    OfTenant,
    RecordBody,
    RequestBody,
    TenantRouter,
    WantedPage,
    own_tenant,
)
from gateway.accounts.tenants.service import reading_of_tenant
from gateway.auth.store import is_person
from gateway.http.services import made
from gateway.platform.database.paging import Page, PageRequest, list_records, read_page
from gateway.platform.database.tables import MemberRow, TenantRow
from gateway.records.checks import check_known, check_name, checked_email
from gateway.records.errors import BadRequestError, InvalidParameterError, NotFoundError, shown
from gateway.records.grants import bounds_of_role
from gateway.records.limits import JWT_PREFIX
from gateway.records.records import Member, Person
from gateway.records.scopes import Role, Scope
from gateway.records.times import utc_now


class MemberService(Service):
    """Adds, changes and removes members; every change is audited.

    If a credential of the tenant makes the call, its grant is the `grantor`. It can give, change
    and remove only roles without more rights than its own; otherwise the methods raise
    PermissionDeniedError. A tenant with an owner keeps one: the last owner can be neither removed
    nor given another role.
    """

    async def add(
        self,
        tenant_id: str,
        *,
        subject: str | None = None,
        email: str | None = None,
        role: Role,
        name: str | None = None,
        **by: Unpack[By],
    ) -> Member:
        """Add the person whose tokens have this claim `sub`, or who has this e-mail.

        Exactly one of them is given, and is the default name. An e-mail invites: the first person
        who logs in with it, verified by the identity provider, becomes the member.
        """
        check_known(tenant_id, "tenant")
        if (subject is None) == (email is None):
            raise InvalidParameterError(
                "A member needs either 'subject' or 'email', not both.", param="subject"
            )
        if subject is not None:
            check_name(subject, param="subject")
        if email is not None:
            email = checked_email(email)
        given = subject or email or ""
        check_name(name or given)
        _check_role(role, by)
        member = Member(
            id=f"mbr_{secrets.token_hex(8)}",
            tenant_id=tenant_id,
            subject=subject,
            issuer=None,
            email=email,
            name=name or given,
            role=role,
            created_at=utc_now(),
        )
        identity = {"email": email} if subject is None else {"subject": subject}
        details = {**identity, "name": member.name, "role": role}
        conflict = f"{shown(given)} is already a member."
        async with changing(self._database, tenant_id, **by, conflict=conflict) as change:
            await require_room(change.transaction, MemberRow, tenant_id)
            await change.insert(MemberRow(**asdict(member)))
            await change.audit("member.add", member.id, details)
            change.announce(self._announcer.tenant_changed, tenant_id)
        return member

    async def log_in(
        self, person: Person, email: str | None, roles: Mapping[str, Role]
    ) -> list[tuple[str, str, Role]]:
        """Return what `of_person` returns, for a person who logs in.

        Args:
            person: the person.
            email: an address that the identity provider has verified to be the person's. Members
                that were invited with it become this person.
            roles: see `of_person`.
        """
        if email is not None:
            async with self._database.reading() as transaction:
                is_invited = bool(await list_records(transaction, MemberRow, *_invited(email)))
            if is_invited:
                await self._accept(person, email)
        return await self.of_person(person, roles)

    async def of_person(
        self, person: Person, roles: Mapping[str, Role]
    ) -> list[tuple[str, str, Role]]:
        """Return the ids and names of a person's tenants with the roles, sorted by the names.

        `roles` by tenant are those that groups give, which replace those of members.
        """
        is_its = and_(MemberRow.tenant_id == TenantRow.id, is_person(person))
        memberships = (
            select(TenantRow.id, TenantRow.name, MemberRow.role)
            .outerjoin(MemberRow, is_its)
            .where(or_(MemberRow.id.is_not(None), TenantRow.id.in_(roles)))
            .order_by(TenantRow.name, TenantRow.id)
        )
        async with self._database.reading() as transaction:
            rows = await transaction.execute(memberships)
            return [(id_, name, roles.get(id_, role)) for id_, name, role in rows]

    async def _accept(self, person: Person, email: str) -> None:
        details = {"email": email, "issuer": person.issuer, "subject": person.subject}
        async with changing(self._database, actor=f"{JWT_PREFIX}{person.subject}") as change:
            for member in await list_records(change.transaction, MemberRow, *_invited(email)):
                if await _identify(change.transaction, member, person):
                    tenant_id = member.tenant_id
                    await change.audit("member.accept", member.id, details, tenant_id=tenant_id)
                    change.announce(self._announcer.tenant_changed, tenant_id)

    async def page(self, tenant_id: str, wanted: PageRequest) -> Page[Member]:
        """Return a page of the tenant's members, oldest first."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            is_its = MemberRow.tenant_id == tenant_id
            return await read_page(transaction, MemberRow, wanted, is_its)

    async def get(self, tenant_id: str, given: str) -> Member:
        """Return the tenant's member with this id, subject or e-mail."""
        async with self._database.reading() as transaction:
            return await _find(transaction, tenant_id, given)

    async def set_role(self, tenant_id: str, given: str, *, role: Role, **by: Unpack[By]) -> Member:
        """Change a member's role on every gateway."""
        _check_role(role, by)
        # If two owners demote each other at the same time, the calls must be serialized, or no
        # owner would remain.
        async with changing(self._database, tenant_id, **by, is_locked=True) as change:
            member = await _find(change.transaction, tenant_id, given)
            _check_role(member.role, by)
            if role is not Role.OWNER:
                await _check_not_last_owner(change.transaction, member)
            await change.set(MemberRow, MemberRow.id == member.id, {"role": role})
            details = {"role": role, "former_role": member.role}
            await change.audit("member.change", member.id, details)
            change.announce(self._announcer.tenant_changed, tenant_id)
        return replace(member, role=role)

    async def remove(self, tenant_id: str, given: str, **by: Unpack[By]) -> Member:
        """Remove a member on every gateway; return the removed member."""
        async with changing(self._database, tenant_id, **by, is_locked=True) as change:
            member = await _find(change.transaction, tenant_id, given)
            _check_role(member.role, by)
            await _check_not_last_owner(change.transaction, member)
            await change.transaction.execute(delete(MemberRow).where(MemberRow.id == member.id))
            details = {"subject": member.subject or member.email, "role": member.role}
            await change.audit("member.remove", member.id, details)
            change.announce(self._announcer.tenant_changed, tenant_id)
        return member


async def _find(transaction: AsyncSession, tenant_id: str, given: str) -> Member:
    """Return the tenant's member with this id, else this subject, else this e-mail."""
    check_known(tenant_id, "tenant")
    id_, subject, email = MemberRow.id, MemberRow.subject, MemberRow.email
    is_named = or_(id_ == given, subject == given, email == given.lower())
    members: list[Member] = []
    if given.isprintable():
        is_its = MemberRow.tenant_id == tenant_id
        members = await list_records(transaction, MemberRow, is_its, is_named)
    if not members:
        raise NotFoundError(f"The tenant {shown(tenant_id)} has no member {shown(given)}.")
    return min(members, key=lambda member: (member.id != given, member.subject != given))


def _invited(email: str) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions of members of all tenants who have not logged in yet."""
    return MemberRow.email == email, MemberRow.subject.is_(None)


async def _identify(transaction: AsyncSession, member: Member, person: Person) -> bool:
    """Set the subject of an invited member.

    Return False if the member has one, or if another member of the tenant has this one.
    """
    other = aliased(MemberRow)
    is_used = exists().where(other.tenant_id == member.tenant_id, other.subject == person.subject)
    found = await transaction.execute(
        update(MemberRow)
        .where(MemberRow.id == member.id, MemberRow.subject.is_(None), ~is_used)
        .values(subject=person.subject, issuer=person.issuer)
        .returning(MemberRow.id)
    )
    return found.first() is not None


async def _check_not_last_owner(transaction: AsyncSession, member: Member) -> None:
    if member.role is not Role.OWNER:
        return
    owners = select(func.count()).where(
        MemberRow.tenant_id == member.tenant_id, MemberRow.role == Role.OWNER
    )
    if await transaction.scalar(owners) == 1:
        raise BadRequestError(
            f"{shown(member.name)} is the last owner: make another member an owner first."
        )


def _check_role(role: Role, by: By) -> None:
    if (grantor := by.get("grantor")) is not None:
        grantor.require(bounds_of_role(role), of=f"the role '{role}'")


class MemberAddition(RequestBody):
    """A member to add."""

    subject: Name | None = Field(None, description="The `sub` claim of the person's tokens.")
    email: Name | None = Field(
        None,
        description="Instead of a subject: the person who first logs in to the console with this "
        "e-mail, verified by the identity provider, becomes the member.",
    )
    role: Role = Field(description="Role of the member.")
    name: Name | None = Field(None, description="Display name. Default: the subject or e-mail.")


class MemberChange(RequestBody):
    """Changes to a member."""

    role: Role = Field(description="Role of the member.")


class MemberBody(RecordBody):
    """A member."""

    object: Literal["member"] = "member"
    id: str
    tenant_id: str
    subject: str | None = Field(description="Null until an invited person has logged in.")
    issuer: str | None = Field(
        description="The issuer that uses this subject. Null: the deployment's identity provider."
    )
    email: str | None
    name: str
    role: Role
    created_at: datetime


class RemovedMember(BaseModel):
    """A removed member."""

    object: Literal["member.deleted"] = "member.deleted"
    id: str
    deleted: Literal[True] = True


router = TenantRouter("/members", "Members", own_tenant(Scope.MEMBERS, of_tenant=True))


Members = Annotated[MemberService, made(MemberService)]
MemberId = Annotated[str, Path(description="Id, subject or e-mail of the member.")]


@router.get("", summary="List members", response_model=ListBody[MemberBody])
async def list_members(members: Members, caller: OfTenant, wanted: WantedPage) -> Page[Member]:
    """List members, oldest first.

    All routes under `/v1/members` need the scope `members`.
    """
    return await members.page(caller.tenant_id, wanted)


@router.post("", summary="Add a member", response_model=MemberBody)
async def add_member(members: Members, caller: OfTenant, body: MemberAddition) -> Member:
    """Add a member. Operators add the first owner of a tenant.

    The role decides what the person's tokens may do, unless a token asks for less.
    """
    return await members.add(caller.tenant_id, **body.given(), **caller.by)


@router.get("/{member_id:path}", summary="Get a member", response_model=MemberBody)
async def get_member(members: Members, caller: OfTenant, member_id: MemberId) -> Member:
    """Get a member with the role."""
    return await members.get(caller.tenant_id, member_id)


@router.patch("/{member_id:path}", summary="Change the role of a member", response_model=MemberBody)
async def change_member(
    members: Members, caller: OfTenant, member_id: MemberId, body: MemberChange
) -> Member:
    """Change the role of a member. The role of the last owner cannot change."""
    return await members.set_role(caller.tenant_id, member_id, role=body.role, **caller.by)


@router.delete("/{member_id:path}", summary="Remove a member", response_model=RemovedMember)
async def remove_member(members: Members, caller: OfTenant, member_id: MemberId) -> Member:
    """Remove a member. The last owner cannot be removed."""
    return await members.remove(caller.tenant_id, member_id, **caller.by)
