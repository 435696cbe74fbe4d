"""Members of a tenant: add, change roles and remove."""

import secrets
from dataclasses import replace

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.engine import Database
from gateway.database.locking import lock_tenant
from gateway.database.paging import Page, PageRequest
from gateway.database.tables import MemberRow
from gateway.errors import (
    BadRequestError,
    ConflictError,
    InvalidParameterError,
    NotFoundError,
    shown,
)
from gateway.management.audit.log import SYSTEM, AuditLog
from gateway.management.members.store import MemberStore
from gateway.management.shared.capacity import require_room
from gateway.management.tenants.service import reading_of_tenant
from gateway.tenancy.changes import ChangeAnnouncer
from gateway.tenancy.checks import check_known, check_name, checked_email
from gateway.tenancy.grants import Grant, bounds_of_role
from gateway.tenancy.records import Member, Person, Role
from gateway.tenancy.times import utc_now


class MemberService:
    """Adds, changes and removes members; every change is audited.

    If a credential of the tenant makes the call, its grant is the `grantor`. It can give, change
    and remove only roles without more rights than its own; otherwise the methods raise
    PermissionDeniedError. A tenant with an owner keeps one: the last owner can be neither removed
    nor given another role.
    """

    def __init__(self, database: Database, announcer: ChangeAnnouncer) -> None:
        self._database = database
        self._announcer = announcer

    async def add(
        self,
        tenant_id: str,
        *,
        subject: str | None = None,
        email: str | None = None,
        role: Role,
        name: str | None = None,
        grantor: Grant | None = None,
        actor: str = SYSTEM,
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
        _check_role(role, grantor)
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
        try:
            async with self._database.writing() as transaction:
                await require_room(transaction, MemberRow, tenant_id)
                await MemberStore(transaction).add(member)
                await AuditLog(transaction).append(
                    "member.add", member.id, actor=actor, tenant_id=tenant_id, details=details
                )
        except IntegrityError as error:
            raise ConflictError(f"{shown(given)} is already a member.") from error
        await self._announcer.tenant_changed(tenant_id)
        return member

    async def log_in(self, person: Person, email: str | None) -> list[tuple[Member, str]]:
        """Return the memberships of a person who logs in, with the names of the tenants.

        Args:
            person: the person.
            email: an address that the identity provider has verified to be the person's. Members
                that were invited with it become this person.
        """
        async with self._database.reading() as transaction:
            is_invited = email is not None and await MemberStore(transaction).invited(email)
        if is_invited and email is not None:
            await self._accept(person, email)
        return await self.of_person(person)

    async def of_person(self, person: Person) -> list[tuple[Member, str]]:
        """Return the memberships of a person with the names of the tenants."""
        async with self._database.reading() as transaction:
            return await MemberStore(transaction).of_person(person)

    async def _accept(self, person: Person, email: str) -> None:
        accepted = list[Member]()
        async with self._database.writing() as transaction:
            store = MemberStore(transaction)
            for member in await store.invited(email):
                if not await store.identify(member, person):
                    continue
                accepted.append(member)
                await AuditLog(transaction).append(
                    "member.accept",
                    member.id,
                    actor=f"jwt:{person.subject}",
                    tenant_id=member.tenant_id,
                    details={"email": email, "issuer": person.issuer, "subject": person.subject},
                )
        for member in accepted:
            await self._announcer.tenant_changed(member.tenant_id)

    async def list_of_tenant(self, tenant_id: str) -> list[Member]:
        """Return the tenant's members, oldest first."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await MemberStore(transaction).list_of_tenant(tenant_id)

    async def page(self, tenant_id: str, wanted: PageRequest) -> Page[Member]:
        """Return a page of the tenant's members, oldest first."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await MemberStore(transaction).page(tenant_id, wanted)

    async def get(self, tenant_id: str, given: str) -> Member:
        """Return the tenant's member with this id, subject or e-mail."""
        async with self._database.reading() as transaction:
            return await _find(transaction, tenant_id, given)

    async def set_role(
        self,
        tenant_id: str,
        given: str,
        *,
        role: Role,
        grantor: Grant | None = None,
        actor: str = SYSTEM,
    ) -> Member:
        """Change a member's role on every gateway."""
        _check_role(role, grantor)
        async with self._database.writing() as transaction:
            member = await _find_locked(transaction, tenant_id, given)
            _check_role(member.role, grantor)
            if role is not Role.OWNER:
                await _check_not_last_owner(transaction, member)
            await MemberStore(transaction).set_role(tenant_id, member.id, role)
            await AuditLog(transaction).append(
                "member.change",
                member.id,
                actor=actor,
                tenant_id=tenant_id,
                details={"role": role, "former_role": member.role},
            )
        await self._announcer.tenant_changed(tenant_id)
        return replace(member, role=role)

    async def remove(
        self,
        tenant_id: str,
        given: str,
        *,
        grantor: Grant | None = None,
        actor: str = SYSTEM,
    ) -> Member:
        """Remove a member on every gateway; return the removed member."""
        async with self._database.writing() as transaction:
            member = await _find_locked(transaction, tenant_id, given)
            _check_role(member.role, grantor)
            await _check_not_last_owner(transaction, member)
            await MemberStore(transaction).remove(tenant_id, member.id)
            await AuditLog(transaction).append(
                "member.remove",
                member.id,
                actor=actor,
                tenant_id=tenant_id,
                details={"subject": member.subject or member.email, "role": member.role},
            )
        await self._announcer.tenant_changed(tenant_id)
        return member


async def _find(transaction: AsyncSession, tenant_id: str, given: str) -> Member:
    check_known(tenant_id, "tenant")
    is_text = given.isprintable()
    member = await MemberStore(transaction).find(tenant_id, given) if is_text else None
    if member is None:
        raise NotFoundError(f"The tenant {shown(tenant_id)} has no member {shown(given)}.")
    return member


async def _find_locked(transaction: AsyncSession, tenant_id: str, given: str) -> Member:
    # If two owners demote each other at the same time, the calls must be serialized, or no owner
    # would remain.
    check_known(tenant_id, "tenant")
    await lock_tenant(transaction, tenant_id)
    return await _find(transaction, tenant_id, given)


async def _check_not_last_owner(transaction: AsyncSession, member: Member) -> None:
    if member.role is not Role.OWNER:
        return
    if await MemberStore(transaction).count(member.tenant_id, Role.OWNER) == 1:
        raise BadRequestError(
            f"{shown(member.name)} is the last owner: make another member an owner first."
        )


def _check_role(role: Role, grantor: Grant | None) -> None:
    if grantor is not None:
        grantor.require(bounds_of_role(role), of=f"the role '{role}'")
