"""In-memory copies of the ready adapters and of all aliases, so that requests need no query."""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from sqlalchemy import select
from typing_extensions import override

from gateway.platform.database.engine import Database
from gateway.platform.database.table_copy import TableCopy
from gateway.platform.database.tables import AdapterRow, AliasRow
from gateway.records.adapters import Adapter, AdapterState
from gateway.records.aliases import Alias

_READY: Final = (
    select(AdapterRow)
    .where(AdapterRow.state == AdapterState.READY)
    .order_by(AdapterRow.created_at, AdapterRow.id)
)
_ALIASES: Final = select(AliasRow).order_by(AliasRow.name)


class AdapterBook(TableCopy):
    """A copy of the adapters that are ready: the last one that was loaded."""

    def __init__(self, database: Database) -> None:
        super().__init__(AdapterRow.__tablename__)
        self._database = database
        self._own: dict[str, dict[str, Adapter]] = {}
        self._shared: dict[str, Adapter] = {}

    def find(self, tenant_id: str, name: str) -> Adapter | None:
        """Return the tenant's own adapter with this name, else the shared one."""
        own = self._own.get(tenant_id)
        return (own and own.get(name)) or self._shared.get(name)

    def visible_to(self, tenant_id: str) -> list[Adapter]:
        """Return the adapters that a tenant may use by their names."""
        return list((self._shared | self._own.get(tenant_id, {})).values())

    @override
    async def refresh(self) -> None:
        async with self._database.reading() as transaction:
            adapters = [row.to_record() for row in await transaction.scalars(_READY)]
        own: defaultdict[str, dict[str, Adapter]] = defaultdict(dict)
        for adapter in adapters:
            own[adapter.tenant_id][adapter.name] = adapter
        self._own = dict(own)
        self._shared = {each.name: each for each in reversed(adapters) if each.is_shared}


class AliasBook(TableCopy):
    """A copy of the aliases that operators have defined: the last one that was loaded."""

    def __init__(self, database: Database) -> None:
        super().__init__(AliasRow.__tablename__)
        self._database = database
        self._aliases: Mapping[str, Alias] = {}
        self._patterns: Sequence[tuple[re.Pattern[str], Alias]] = ()

    @property
    def aliases(self) -> list[Alias]:
        """Every alias that is no pattern, by name."""
        return [alias for alias in self._aliases.values() if not alias.is_pattern]

    def matching(self, name: str, allows: Callable[[str], bool]) -> Alias | None:
        """Return the pattern for a name that nothing else has; None if there is none.

        It is the longest of the matching patterns that the caller may use, given whether it may use
        each name. So tenants with different models may have different patterns for one name.
        """
        return next(
            (
                alias
                for pattern, alias in self._patterns
                if pattern.fullmatch(name) and alias.is_allowed(allows)
            ),
            None,
        )

    def find(self, name: str) -> Alias | None:
        """Return the alias of this name; None if there is none."""
        return self._aliases.get(name)

    @override
    async def refresh(self) -> None:
        async with self._database.reading() as transaction:
            rows = await transaction.scalars(_ALIASES)
            self._aliases = {row.name: row.to_record() for row in rows}
        patterns = (each for each in self._aliases.values() if each.is_pattern)
        self._patterns = [
            (re.compile(fnmatch.translate(each.name), re.IGNORECASE), each)
            for each in sorted(patterns, key=lambda each: -len(each.name))
        ]
