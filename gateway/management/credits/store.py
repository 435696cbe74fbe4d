"""Queries on the table `credits`."""

from dataclasses import asdict
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from gateway.database.paging import Page, PageRequest, read_page
from gateway.database.tables import CreditRow
from gateway.tenancy.records import Credit, CreditKind


class CreditStore:
    """Changes of prepaid balances, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(self, credit: Credit) -> None:
        """Append a change of a balance."""
        self._transaction.add(CreditRow(**asdict(credit)))
        await self._transaction.flush()

    async def total(self, tenant_id: str) -> int:
        """Return the sum of all changes in micro-dollars."""
        total = await self._transaction.scalar(
            select(func.sum(CreditRow.amount_micros)).where(CreditRow.tenant_id == tenant_id)
        )
        return int(total or 0)

    async def list_of_tenant(self, tenant_id: str) -> list[Credit]:
        """Return all changes of the tenant's balance, oldest first."""
        rows = await self._transaction.scalars(
            select(CreditRow)
            .where(CreditRow.tenant_id == tenant_id)
            .order_by(CreditRow.created_at, CreditRow.id)
        )
        return [row.to_record() for row in rows]

    async def page(self, tenant_id: str, wanted: PageRequest) -> Page[Credit]:
        """Return a page of changes of the tenant's balance, oldest first."""
        page = await read_page(
            self._transaction, CreditRow, wanted, CreditRow.tenant_id == tenant_id
        )
        return Page([row.to_record() for row in page.entries], page.has_more)

    async def newest_grant(self, tenant_id: str) -> Credit | None:
        """Return the tenant's most recent grant."""
        row = await self._transaction.scalar(
            select(CreditRow)
            .where(CreditRow.tenant_id == tenant_id, CreditRow.kind == CreditKind.GRANT)
            .order_by(CreditRow.created_at.desc(), CreditRow.id.desc())
            .limit(1)
        )
        return None if row is None else row.to_record()

    async def tenants_with_expired(self, before: datetime) -> list[str]:
        """Return the tenants with a grant that expired before then and was not taken back."""
        expiry = aliased(CreditRow)
        rows = await self._transaction.scalars(
            select(CreditRow.tenant_id)
            .outerjoin(expiry, expiry.grant_id == CreditRow.id)
            .where(CreditRow.expires_at < before, expiry.id.is_(None))
            .distinct()
            .order_by(CreditRow.tenant_id)
        )
        return list(rows)
