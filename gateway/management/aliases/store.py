"""Queries on the table `model_aliases`."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.tables import AliasRow
from gateway.tenancy.aliases import Alias


class AliasStore:
    """The aliases, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def get(self, name: str) -> Alias | None:
        """Return the alias, or None if it does not exist."""
        row = await self._transaction.get(AliasRow, name)
        return None if row is None else row.to_record()

    async def list_all(self) -> list[Alias]:
        """Return all aliases, by name."""
        rows = await self._transaction.scalars(select(AliasRow).order_by(AliasRow.name))
        return [row.to_record() for row in rows]

    async def put(self, alias: Alias) -> None:
        """Insert the alias, or replace the one of the same name."""
        await self._transaction.merge(
            AliasRow(
                name=alias.name,
                weights=dict(alias.weights),
                sticky=alias.sticky,
                fallback=alias.fallback,
                sunset_at=alias.sunset_at,
                deprecated_at=alias.deprecated_at,
                replacement=alias.replacement,
                created_at=alias.created_at,
            )
        )

    async def remove(self, name: str) -> None:
        """Delete the alias."""
        await self._transaction.delete(await self._transaction.get_one(AliasRow, name))
