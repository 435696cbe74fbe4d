"""Queries on the table `members`."""

from dataclasses import asdict

from sqlalchemy import delete, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from gateway.auth.store import is_person
from gateway.database.paging import Page, PageRequest, read_page
from gateway.database.tables import MemberRow, TenantRow
from gateway.tenancy.records import Member, Person, Role


class MemberStore:
    """The tenants' members, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(self, member: Member) -> None:
        """Insert a member; the subject and the e-mail must be unused in its tenant."""
        self._transaction.add(MemberRow(**asdict(member)))
        await self._transaction.flush()

    async def find(self, tenant_id: str, given: str) -> Member | None:
        """Return the tenant's member with this id, else this subject, else this e-mail."""
        rows = await self._transaction.scalars(
            select(MemberRow)
            .where(MemberRow.tenant_id == tenant_id)
            .where(
                or_(
                    MemberRow.id == given,
                    MemberRow.subject == given,
                    MemberRow.email == given.lower(),
                )
            )
        )
        members = [row.to_record() for row in rows]
        return min(
            members, key=lambda member: (member.id != given, member.subject != given), default=None
        )

    async def invited(self, email: str) -> list[Member]:
        """Return the members of all tenants with this e-mail who have not logged in yet."""
        rows = await self._transaction.scalars(
            select(MemberRow).where(MemberRow.email == email, MemberRow.subject.is_(None))
        )
        return [row.to_record() for row in rows]

    async def identify(self, member: Member, person: Person) -> bool:
        """Set the subject of an invited member.

        Return False if the member has one, or if another member of the tenant has this one.
        """
        other = aliased(MemberRow)
        is_used = exists().where(
            other.tenant_id == member.tenant_id, other.subject == person.subject
        )
        found = await self._transaction.execute(
            update(MemberRow)
            .where(MemberRow.id == member.id, MemberRow.subject.is_(None), ~is_used)
            .values(subject=person.subject, issuer=person.issuer)
            .returning(MemberRow.id)
        )
        return found.first() is not None

    async def of_person(self, person: Person) -> list[tuple[Member, str]]:
        """Return a person's memberships with the names of the tenants, sorted by these."""
        rows = await self._transaction.execute(
            select(MemberRow, TenantRow.name)
            .join(TenantRow, TenantRow.id == MemberRow.tenant_id)
            .where(is_person(person))
            .order_by(TenantRow.name, TenantRow.id)
        )
        return [(row.to_record(), name) for row, name in rows]

    async def count(self, tenant_id: str, role: Role) -> int:
        """Return how many members of the tenant have the role."""
        number = await self._transaction.scalar(
            select(func.count())
            .select_from(MemberRow)
            .where(MemberRow.tenant_id == tenant_id, MemberRow.role == role)
        )
        return number or 0

    async def list_of_tenant(self, tenant_id: str) -> list[Member]:
        """Return the tenant's members, oldest first."""
        rows = await self._transaction.scalars(
            select(MemberRow)
            .where(MemberRow.tenant_id == tenant_id)
            .order_by(MemberRow.created_at, MemberRow.id)
        )
        return [row.to_record() for row in rows]

    async def page(self, tenant_id: str, wanted: PageRequest) -> Page[Member]:
        """Return a page of the tenant's members, oldest first."""
        page = await read_page(
            self._transaction, MemberRow, wanted, MemberRow.tenant_id == tenant_id
        )
        return Page([row.to_record() for row in page.entries], page.has_more)

    async def set_role(self, tenant_id: str, member_id: str, role: Role) -> None:
        """Change the role of the tenant's member."""
        await self._transaction.execute(
            update(MemberRow)
            .where(MemberRow.tenant_id == tenant_id, MemberRow.id == member_id)
            .values(role=role)
        )

    async def remove(self, tenant_id: str, member_id: str) -> None:
        """Remove the tenant's member."""
        await self._transaction.execute(
            delete(MemberRow).where(MemberRow.tenant_id == tenant_id, MemberRow.id == member_id)
        )
