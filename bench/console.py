"""Times of the console's pages with a large ledger on PostgreSQL: `python -m bench.console`.

The database has a million ledger rows of 90 days, a thousand tenants and, in the largest tenant,
a thousand keys, which sent 40 % of the requests. Redis has 5,000 live requests of that tenant, the
balances of 999 prepaid tenants, and 5,000 counts of rejected requests. Every page is requested ten
times over HTTP by a browser without a cache. Goal: less than 200 ms at the median, and no page that
grows with the number of rows.
"""

import asyncio
import json
import re
import secrets
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import httpx
import msgspec
from redis.asyncio import Redis
from sqlalchemy import text

from bench.postgres import running_postgres
from bench.sluice import Sluice, running_sluice
from bench.starting import MODEL
from bench.systems import Deployment, Engine
from contract import keys
from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.billing.ledger.rollups import Rollups
from gateway.limits.counters import FIELD, AccountNumbers
from gateway.limits.refusal_log import PeriodCounts
from gateway.limits.replies import ReservationRequest
from gateway.limits.store import QuotaStore
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.partitions import make_partitions
from gateway.platform.redis_client import shared_connection
from gateway.records.limits import LimitName, Limits, LimitScope, SubjectLimits
from gateway.records.scopes import TENANT_SCOPES, Scope
from gateway.records.times import month_start, utc_now
from gateway.records.usage_record import Counts, UsageRecord

BIG: Final = "big"
GOAL_MS: Final = 200.0
LIVE: Final = 5_000
LIVE_MS: Final = 600_000
TIMES: Final = 10
DAYS: Final = 90
CUSTOMERS: Final = (
    "/console",
    "/console/usage",
    "/console/usage?by=key",
    "/console/usage?by=day",
    "/console/requests",
    "/console/requests?start=2026-01-01T00:00:00&key={key}",
    "/console/requests/{request}",
    "/console/limits",
    "/console/keys",
    "/console/keys/{key}",
    "/console/audit",
    "/console/adapters",
    "/console/playground",
    "/console/start",
    "/status",
    "/status.json",
)
OPERATORS: Final = (
    "/console",
    "/console/tenants",
    "/console/tenants?search=77",
    "/console/tenants/big",
    "/console/tenants/big/live",
    "/console/tenants/big/invoices/{month}",
    "/console/models",
    "/console/adapters",
    "/console/aliases",
    "/console/usage",
    "/console/usage?by=key",
    "/console/requests",
    "/console/refusals",
    "/console/refusals?since=7d",
    "/console/refusals?tenant=big",
    "/console/money",
    "/console/prices",
    "/console/audit",
)

_FILL: Final = """
INSERT INTO usage_ledger (request_id, created_at, ended_at, tenant_id, project_id, credential_id,
  model, endpoint, dialect, service_tier, is_streamed, is_prepaid, gateway, jobs, prompt_price,
  cached_price, completion_price, outcome, code, prompt_tokens, cached_tokens, completion_tokens,
  free_prompt_tokens, free_cached_tokens, free_completion_tokens, cost_micros, first_token_ms)
SELECT 'cmpl-' || n, at, at + interval '2 seconds',
  CASE WHEN is_big THEN 'big' ELSE 't' || n % 999 END, NULL,
  CASE WHEN is_big THEN 'key_' || n / 5 % 1000 ELSE 'key_t' || n % 999 END,
  'model-' || n / 7 % 5, 'completions', 'openai', 'default', true, false, 'gw-1', 1, 150000, 75000,
  600000, CASE WHEN n % 200 = 0 THEN 'failed' ELSE 'finished' END, '', 100 + n % 900, n % 100,
  n % 400, 0, 0, 0, 100 + n % 500, 20 + n % 300
FROM (SELECT n, n % 5 < 2 AS is_big,
  now() - (n::float / :rows) * interval '90 days' AS at FROM generate_series(1, :rows) AS n) AS rows
"""
_MARK: Final = """
INSERT INTO usage_dirty_hours (hour) SELECT DISTINCT date_trunc('hour', created_at, 'UTC')
FROM usage_ledger
"""


async def _fill(sluice: Sluice, rows: int) -> dict[str, str]:
    """Fill the database. Return keys of a customer and of an operator, and example ids."""
    database = Database(sluice.database_url, statement_timeout_seconds=None)
    redis = Redis(port=sluice.redis_port)
    announcer = ChangeAnnouncer(redis)
    tenants, made_keys = TenantService(database, announcer), KeyService(database, announcer)
    try:
        await tenants.create("Big", tenant_id=BIG, limits={LimitName.BUDGET: 10**12})
        made: dict[str, str] = {}
        created = await made_keys.create(BIG, name="console", scopes=frozenset(Scope))
        made["secret"] = created.key.reveal()
        async with database.writing() as transaction:
            now = utc_now()
            days = (now - timedelta(days=day) for day in range(DAYS + 2))
            await make_partitions(transaction, map(month_start, days))
            values = [
                {"id": f"t{number}", "name": f"Tenant {number}", "at": now} for number in range(999)
            ]
            await transaction.execute(
                text(
                    "INSERT INTO tenants (id, name, weight, status, created_at, billing) "
                    "VALUES (:id, :name, 1, 'active', :at, 'prepaid')"
                ),
                values,
            )
            await transaction.execute(text(_FILL), {"rows": rows})
            await transaction.execute(text(_MARK))
        for number in range(999):
            created = await made_keys.create(BIG, name=f"key {number}", scopes=TENANT_SCOPES)
        made["key"], made["request"] = created.record.id, "cmpl-1"
        made["month"] = f"{utc_now():%Y-%m}"
        await _fill_redis(redis)
        await Rollups(database).make_all()
        async with database.engine.connect() as connection:
            for table in ("usage_ledger", "usage_rollups"):
                await connection.execute(text(f"ANALYZE {table}"))
            await connection.commit()
        return made
    finally:
        await redis.aclose()
        await database.aclose()


async def _fill_redis(redis: Redis) -> None:
    """Let Redis have live requests, balances and counts of rejected requests."""
    executor = shared_connection(redis)
    store, counts = QuotaStore(executor), PeriodCounts(executor)
    try:
        subjects = (SubjectLimits(LimitScope.TENANT, BIG, Limits()),)
        draft = UsageRecord(
            request_id="",
            tenant_id=BIG,
            project_id=None,
            credential_id="key_1",
            model=MODEL,
            endpoint="completions",
            dialect="openai",
            gateway="gw-gone",
        )
        for number in range(LIVE):
            record = msgspec.structs.replace(draft, request_id=f"cmpl-live{number}")
            request = ReservationRequest.of(record, subjects, Counts(100, 0, 100))
            await store.reserve(request, lease_ms=LIVE_MS)
        for number in range(999):
            tenant = f"t{number}"
            account = keys.account(keys.bucket_of(tenant), f"t:{tenant}")
            numbers = AccountNumbers(credit_micros=1000 * (number - 300))
            credit = ("seeded", 1, FIELD, numbers.encode())
            await executor.execute_command("HSET", account, *credit)
            for code in ("requests", "tokens", "concurrency", "model_not_found", "budget_exceeded"):
                counts.refused(tenant, code)
        await counts.flush()
    finally:
        await executor.aclose()


def _times(url: str, secret: str, paths: list[str]) -> dict[str, tuple[float, float]]:
    """Return the median and the longest time of each page in milliseconds."""
    found = {}
    with httpx.Client(base_url=url, timeout=60.0) as client:
        form = client.get("/console/login").text
        [token] = re.findall(r'name="csrf" value="([^"]+)"', form)
        client.post("/console/login", data={"csrf": token, "key": secret})
        for path in paths:
            took = []
            for _ in range(TIMES):
                began = time.perf_counter()
                response = client.get(path)
                took.append(1000 * (time.perf_counter() - began))
                if response.status_code != 200:
                    raise click.ClickException(f"{path}: {response.status_code}")
            found[path] = (median(took), max(took))
    return found


@click.command(help=__doc__)
@click.option("--rows", type=click.IntRange(min=1000), default=1_000_000, show_default=True)
def main(rows: int) -> None:
    """Fill a database, request each page, and print the times."""
    deployment = Deployment(engine=Engine.SCRIPTED, max_sequences=64, context_window=2048)
    with (
        tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder,
        running_postgres() as server,
    ):
        name = f"console_{secrets.token_hex(4)}"
        database_url = f"postgresql+asyncpg://{server.create_database(name)}"
        with running_sluice(deployment, Path(folder), database_url=database_url) as sluice:
            began = time.monotonic()
            made = asyncio.run(_fill(sluice, rows))
            click.echo(f"filled in {time.monotonic() - began:.0f} s", err=True)
            [url] = sluice.urls(1)
            operators = sluice.metrics_urls()[1]
            tables: dict[str, Any] = {}
            for audience, base, paths in (
                ("customers", url, CUSTOMERS),
                ("operators", operators, OPERATORS),
            ):
                filled = [path.format(**made) for path in paths]
                times = _times(base, made["secret"], filled)
                tables[audience] = dict(zip(paths, times.values(), strict=True))
    for audience, pages in tables.items():
        for path, (middle, longest) in pages.items():
            mark = "" if middle < GOAL_MS else "  MISSED"
            click.echo(f"| {audience} | `{path}` | {middle:.0f} | {longest:.0f} |{mark}")
    click.echo(json.dumps({"rows": rows, "model": MODEL}), err=True)


if __name__ == "__main__":
    main()
