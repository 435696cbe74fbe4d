"""Derive what is left of a subject's limits from the ledger and the credits."""

from collections.abc import Collection
from typing import Final

from gateway.billing.ledger.store import LedgerStore
from gateway.limits.seeding import Balances
from gateway.platform.database.engine import Database
from gateway.records.limits import LimitScope, SubjectLimits
from gateway.records.times import MAX_MS, to_time

_END_OF_TIME: Final = to_time(MAX_MS)


class LedgerBalances:
    """Derives a subject's counters from the ledger and the credits."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def balances(
        self,
        tenant_id: str,
        subject: SubjectLimits,
        *,
        day_start_ms: int,
        month_start_ms: int,
        request_ids: Collection[str],
    ) -> Balances:
        """Return a subject's counters since the given Unix times, all as of one moment.

        Raises StoreUnavailableError if the database is unreachable.
        """
        async with self._database.snapshot() as transaction:
            store = LedgerStore(transaction)
            today, month = [
                await store.usage_between(
                    tenant_id, subject.scope, subject.id, start=to_time(start), end=_END_OF_TIME
                )
                for start in (day_start_ms, month_start_ms)
            ]
            has_credit = subject.scope is LimitScope.TENANT
            return Balances(
                requests_today=today.requests,
                tokens_today=today.tokens,
                cost_this_month=month.cost_micros,
                credit_micros=await store.credit(tenant_id) if has_credit else None,
                known_ids=await store.known(request_ids),
            )
