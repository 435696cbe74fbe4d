"""Queries on the table `members`."""

from dataclasses import asdict

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.paging import Page, PageRequest, read_page
from gateway.database.tables import MemberRow
from gateway.tenancy.records import Member, Role


class MemberStore:
    """The tenants' members, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(self, member: Member) -> None:
        """Insert a member; the subject must be unused in its tenant."""
        self._transaction.add(MemberRow(**asdict(member)))
        await self._transaction.flush()

    async def find(self, tenant_id: str, id_or_subject: str) -> Member | None:
        """Return the tenant's member; a match by id takes precedence."""
        rows = await self._transaction.scalars(
            select(MemberRow)
            .where(MemberRow.tenant_id == tenant_id)
            .where(or_(MemberRow.id == id_or_subject, MemberRow.subject == id_or_subject))
        )
        members = [row.to_record() for row in rows]
        return min(members, key=lambda member: member.id != id_or_subject, default=None)

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
