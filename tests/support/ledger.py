"""Usage that tests write into the ledger."""

import secrets
from datetime import datetime
from typing import Any

from msgspec.structs import replace
from sqlalchemy import func, select

from gateway.billing.ledger.drain import row_of
from gateway.billing.ledger.rollups import Rollups
from gateway.billing.ledger.store import LedgerStore
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import RejectionRow
from gateway.records.times import to_ms, utc_now
from gateway.records.usage_record import Outcome, UsageRecord


async def use(
    database: Database,
    tenant_id: str,
    cost_micros: int,
    *,
    at: datetime | None = None,
    project_id: str | None = None,
    credential_id: str = "key_1",
    is_prepaid: bool = True,
    times: int = 1,
    **changes: Any,
) -> None:
    """Record requests of a tenant with this cost, a second apart, and update the sums."""
    admitted_ms = to_ms(at or utc_now())
    record = UsageRecord(
        request_id="",
        tenant_id=tenant_id,
        project_id=project_id,
        credential_id=credential_id,
        model="m1",
        endpoint="/v1/completions",
        dialect="openai",
        is_prepaid=is_prepaid,
        created_ms=admitted_ms,
        ended_ms=admitted_ms + 10,
        outcome=Outcome.FINISHED,
        cost_micros=cost_micros,
        engine="vllm 0.32.0",
        preemptions=2,
        recomputed_tokens=64,
    )
    rows = [
        row_of(
            replace(
                record,
                request_id=f"cmpl-{secrets.token_hex(8)}",
                created_ms=admitted_ms + 1000 * number,
                **changes,
            )
        )
        for number in range(times)
    ]
    async with database.writing() as transaction:
        await LedgerStore(transaction).insert(rows)
    await Rollups(database).make_all()


async def rejected(database_url: str, model: str) -> int:
    """Return how many requests to a model the gateways rejected, as written to SQL."""
    database = Database(database_url)
    async with database.reading() as transaction:
        found = await transaction.scalar(
            select(func.sum(RejectionRow.requests)).where(RejectionRow.model == model)
        )
    await database.aclose()
    return found or 0
