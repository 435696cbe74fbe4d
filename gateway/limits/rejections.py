"""Requests that the service rejected before any work: its failures without a ledger row.

A gateway counts them and adds the counts to those in SQL every few seconds, if there are any. While
SQL is unavailable it keeps them. Counts are lost with their gateway, and count twice if SQL accepts
them but its reply is lost.
"""

import asyncio
import logging
from collections import Counter
from datetime import datetime
from typing import Final

from sqlalchemy.dialects import postgresql, sqlite

from common.tasks import raise_if_cancelled
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import RejectionRow
from gateway.records.errors import StoreUnavailableError
from gateway.records.times import hour_of, utc_now

WRITE_SECONDS: Final = 5.0

logger = logging.getLogger(__name__)


class Rejections:
    """The rejections of one gateway that are not in SQL yet."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._pending: Counter[tuple[datetime, str]] = Counter()

    def count(self, model: str) -> None:
        """Count a request to a model of the catalogue; empty if its model is not known."""
        self._pending[hour_of(utc_now()), model] += 1

    async def run(self) -> None:
        """Write the counts periodically until cancelled."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await self.write()
            raise_if_cancelled()

    async def write(self) -> None:
        """Add the counts to those in SQL. They are kept if SQL is unavailable."""
        if not self._pending:
            return
        pending, self._pending = self._pending, Counter()
        try:
            async with self._database.writing() as transaction:
                dialect = transaction.get_bind().dialect.name
                insert = (postgresql if dialect == "postgresql" else sqlite).insert(RejectionRow)
                # Sorted, so that two gateways wait for each other without deadlock.
                for (hour, model), requests in sorted(pending.items()):
                    row = {"hour": hour, "model": model, "requests": requests}
                    await transaction.execute(
                        insert.values(row).on_conflict_do_update(
                            index_elements=[RejectionRow.hour, RejectionRow.model],
                            set_={"requests": RejectionRow.requests + requests},
                        )
                    )
        except StoreUnavailableError as error:
            self._pending.update(pending)
            logger.warning("cannot write rejected requests: %s", error)
