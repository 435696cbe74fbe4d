"""Queries on the table `prices`."""

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from contract.tier import ServiceTier
from gateway.database.tables import PriceRow
from gateway.tenancy.records import Price


class PriceStore:
    """All past, present and future prices, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(
        self,
        model: str,
        service_tier: ServiceTier,
        *,
        micros: Mapping[str, int],
        effective_at: datetime,
        created_at: datetime,
    ) -> Price:
        """Append a price; `micros` has a value for each column whose name ends in `micros`."""
        row = PriceRow(
            model=model,
            service_tier=service_tier,
            effective_at=effective_at,
            created_at=created_at,
            **micros,
        )
        self._transaction.add(row)
        await self._transaction.flush()
        return row.to_record()

    async def list_all(self, model: str | None = None) -> list[Price]:
        """Return the prices of one model or of all, in the order in which they take effect."""
        query = select(PriceRow).order_by(PriceRow.effective_at, PriceRow.id)
        if model is not None:
            query = query.where(PriceRow.model == model)
        return [row.to_record() for row in await self._transaction.scalars(query)]
