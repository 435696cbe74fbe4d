"""Quota counters derived from the ledger."""

from collections.abc import Collection

from typing_extensions import override

from gateway.accounts.database import Database
from gateway.accounts.ledger.rows import MAX_MS
from gateway.accounts.ledger.snapshot import snapshot
from gateway.accounts.ledger.store import LedgerStore
from gateway.accounts.limits import LimitScope, SubjectLimits
from gateway.accounts.times import to_time
from gateway.quota.seeding import Balances, BalanceSource

_END_OF_TIME = to_time(MAX_MS)


class LedgerBalances(BalanceSource):
    """Derives a subject's counters from the ledger and the credits."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @override
    async def balances(
        self,
        tenant_id: str,
        subject: SubjectLimits,
        *,
        day_start_ms: int,
        month_start_ms: int,
        request_ids: Collection[str],
    ) -> Balances:
        """See `BalanceSource`."""
        async with snapshot(self._database) as transaction:
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
