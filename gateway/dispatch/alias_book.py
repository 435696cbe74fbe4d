"""In-memory copy of all aliases, so that requests need no query."""

from collections.abc import Mapping
from typing import Final

from sqlalchemy import select
from typing_extensions import override

from gateway.database.engine import Database
from gateway.database.table_copy import TableCopy
from gateway.database.tables import AliasRow
from gateway.tenancy.aliases import Alias

_ALL: Final = select(AliasRow).order_by(AliasRow.name)


class AliasBook(TableCopy):
    """A copy of the aliases that operators have defined: the last one that was loaded."""

    def __init__(self, database: Database) -> None:
        super().__init__(AliasRow.__tablename__)
        self._database = database
        self._aliases: Mapping[str, Alias] = {}

    @property
    def aliases(self) -> list[Alias]:
        """Every alias, by name."""
        return list(self._aliases.values())

    def find(self, name: str) -> Alias | None:
        """Return the alias of this name; None if there is none."""
        return self._aliases.get(name)

    @override
    async def refresh(self) -> None:
        """Reload the table. Raises StoreUnavailableError, and then keeps the old copy."""
        async with self._database.reading() as transaction:
            rows = await transaction.scalars(_ALL)
            self._aliases = {row.name: row.to_record() for row in rows}
