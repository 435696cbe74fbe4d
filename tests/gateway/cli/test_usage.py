"""`sluice usage` and `sluice audit`."""

import asyncio
import csv
import io
import json
import os
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from redis.asyncio import Redis

from contract import keys
from gateway.accounts.audit.log import AuditLog, HeadSigner, SignedHead
from gateway.limits.counters import FIELD, AccountNumbers
from gateway.platform.database.engine import Database
from gateway.records.money import show_dollars
from gateway.records.usage_record import Outcome, UsageRecord, encode_usage
from tests.gateway.billing.ledger_rows import NOON, add, record
from tests.support.cases import case
from tests.support.processes import free_port
from tests.support.redis_server import RedisServer

Sluice = Callable[..., Result]

NOVEMBER = ("--start", "2026-11-01", "--end", "2026-12-01")


@pytest.fixture
def records(sluice: Sluice, upgraded: None) -> list[UsageRecord]:
    """What two tenants used in November, and one request in October."""
    made = [
        record(NOON, request_id="cmpl-1", model="m1"),
        record(NOON, request_id="cmpl-2", model="=cmd|' /C calc'!A1", outcome=Outcome.FAILED),
        record(NOON + timedelta(days=1), request_id="cmpl-3", project_id="prj_1"),
        record(NOON, request_id="cmpl-4", tenant_id="other", credential_id="jwt:ann"),
        record(NOON - timedelta(days=20), request_id="cmpl-5"),
    ]

    async def store() -> None:
        database = Database(os.environ["SLUICE_DATABASE_URL"])
        await add(database, made)
        await database.aclose()

    asyncio.run(store())
    return made


def shown(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_usage_is_summed_up_by_day_and_group(sluice: Sluice, records: list[UsageRecord]) -> None:
    table = sluice("usage", "show", *NOVEMBER, "--tenant", "acme")
    heading, *rows = table.stdout.splitlines()
    assert heading.split()[:5] == ["FROM", "TO", "REQUESTS", "FAILED", "PROMPT"]
    assert [row.split()[0] for row in rows] == ["2026-11-10", "2026-11-11"]
    assert rows[0].split()[6:8] == ["2", "1"]
    cost = records[0].cost_micros + records[1].cost_micros
    assert rows[0].endswith(f"$0.{cost:06}".rstrip("0"))
    grouped = sluice(
        *("usage", "show", *NOVEMBER, "--bucket", "total", "--group-by", "tenant,project", "--json")
    )
    assert [(each["tenant"], each["project"], each["requests"]) for each in shown(grouped)] == [
        ("acme", None, 2),
        ("acme", "prj_1", 1),
        ("other", None, 1),
    ]
    filtered = sluice("usage", "show", *NOVEMBER, "--key", "jwt:ann", "--json")
    assert [each["requests"] for each in shown(filtered)] == [1]


def test_truncated_report_is_marked(sluice: Sluice, records: list[UsageRecord]) -> None:
    result = sluice("usage", "show", *NOVEMBER, "--limit", "1")
    assert len(result.stdout.splitlines()) == 2
    assert "Only the first 1 lines are shown" in result.stderr


def test_requests_are_shown_newest_first(sluice: Sluice, records: list[UsageRecord]) -> None:
    listed = shown(sluice("usage", "requests", *NOVEMBER, "--tenant", "acme", "--json"))
    assert [each["id"] for each in listed] == ["cmpl-3", "cmpl-2", "cmpl-1"]
    assert listed[2]["cost_micros"] == records[0].cost_micros
    assert listed[2]["prices"]["completion_micros"] == 600_000
    assert listed[1]["outcome"] == "failed"
    table = sluice("usage", "requests", *NOVEMBER, "--limit", "1").stdout.splitlines()
    assert table[0].split()[:2] == ["REQUEST", "TIME"]
    assert table[1].startswith("cmpl-3")


def test_month_is_exported_as_csv_that_runs_no_formula(
    sluice: Sluice, records: list[UsageRecord], tmp_path: Path
) -> None:
    result = sluice("usage", "export", "--tenant", "acme", "--month", "2026-11")
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["id"] for row in rows] == ["cmpl-3", "cmpl-2", "cmpl-1"]
    assert rows[1]["model"] == "'=cmd|' /C calc'!A1"
    assert rows[0]["created_at"] == "2026-11-11T12:00:00Z"
    assert int(rows[2]["cost_micros"]) == records[0].cost_micros
    assert "Requests: 3." in result.stderr
    file = tmp_path / "acme.csv"
    written = sluice(
        *("usage", "export", "--tenant", "acme", "--month", "2026-11", "--output", str(file))
    )
    assert written.stdout == ""
    assert file.read_bytes().decode() == result.stdout_bytes.decode()
    named = sluice("usage", "export", "--tenant", "acme", "--month", "2026-11", "--output", ".")
    assert named.stderr == "Requests: 3, in acme-2026-11.csv.\n"
    assert Path("acme-2026-11.csv").read_bytes() == file.read_bytes()
    nowhere = ("usage", "export", "--tenant", "acme", "--month", "2026-11", "--output", "no/x.csv")
    refused = sluice(*nowhere)
    assert (refused.exit_code, refused.stderr) == (
        *(1, "Error: --output: no/x.csv cannot be written (No such file or directory).\n"),
    )
    nothing = sluice("usage", "export", "--tenant", "acme", "--month", "2026-12").stdout
    assert len(nothing.splitlines()) == 1


def test_invoice_equals_the_records(sluice: Sluice, records: list[UsageRecord]) -> None:
    lines = sluice("invoices", "show", "--tenant", "acme", "2026-11").stdout.splitlines()
    assert lines[0].startswith("Acme (acme), 2026-11 (")
    assert lines[1].split()[:4] == ["MODEL", "TIER", "REQUESTS", "FAILED"]
    of_month = {"cmpl-1", "cmpl-2", "cmpl-3"}
    total = sum(each.cost_micros for each in records if each.request_id in of_month)
    assert lines[-1] == f"Total: {show_dollars(total)}"
    found = shown(sluice("invoices", "show", "--tenant", "acme", "2026-11", "--json"))
    assert (found["object"], found["total_micros"]) == ("invoice", total)


WRONG = [
    (("export", "--tenant", "acme", "--month", "2026-13"), 'Given: "2026-13".'),
    (("export", "--tenant", "nobody", "--month", "2026-11"), 'There is no tenant "nobody".'),
    (("show", "--start", "soon"), "'start' must be a date or time from 2000 to 2999"),
    (("show", "--start", "2026-11-02", "--end", "2026-11-01"), "'start' must be before 'end'."),
    (("show", "--start", "2020-01-01"), "at most 400 days"),
    (("show", "--bucket", "hour", "--start", "2026-01-01", "--end", "2026-03-01"), "31 days"),
    (("show", "--group-by", "colour"), "'group_by' must name any of tenant, model, key, project"),
]
"""Queries, and their errors."""


@pytest.mark.usefixtures("upgraded")
def test_wrong_question_is_one_sentence(sluice: Sluice) -> None:
    for arguments, message in WRONG:
        with case(arguments):
            result = sluice("usage", *arguments)
            assert result.exit_code == 1
            [line] = result.stderr.splitlines()
            assert message in line


@pytest.mark.usefixtures("upgraded")
def test_reconcile_corrects_differences_and_finds_none_the_second_time(
    sluice: Sluice, records: list[UsageRecord], redis_server: RedisServer
) -> None:
    assert sluice("tenants", "create", "Idle", "--id", "idle").exit_code == 0
    bucket, now = keys.bucket_of("idle"), datetime.now(UTC)

    async def disturb() -> None:
        redis = Redis.from_url(redis_server.url)
        await redis.flushall()
        today = int(now.timestamp()) // 86_400
        numbers = AccountNumbers(day=today, month=int(f"{now:%Y%m}"), requests=5)
        account = keys.account(bucket, "t:idle")
        execute: Any = redis.execute_command
        await execute("HSET", account, "seeded", 1, "v", 1, FIELD, numbers.encode())
        await redis.sadd(keys.accounts(bucket), "t:idle")
        late = record(NOON, request_id="cmpl-late")
        await redis.xadd(keys.usage(keys.bucket_of("acme")), {"u": encode_usage(late)})
        await redis.aclose()

    asyncio.run(disturb())
    first = sluice("usage", "reconcile")
    assert first.exit_code == 0, first.output
    lines = [line.split() for line in first.stdout.splitlines()]
    assert ["idle", "t:idle", "requests_of_day", "5", "0"] in lines
    assert "     1 counters were wrong and will be derived again." in first.stdout
    listed = shown(sluice("usage", "requests", *NOVEMBER, "--json"))
    assert "cmpl-late" in {each["id"] for each in listed}
    second = shown(sluice("usage", "reconcile", "--days", "4", "--json"))
    assert (second["is_clean"], second["differences"], second["wrong_hours"]) == (True, [], [])


@pytest.mark.usefixtures("upgraded")
def test_reconcile_without_redis_is_one_sentence(sluice: Sluice) -> None:
    port = free_port()
    result = sluice("usage", "reconcile", "--redis-url", f"redis://127.0.0.1:{port}")
    assert (result.exit_code, result.stderr) == (
        1,
        f"Error: Redis at 127.0.0.1:{port}: connection refused.\n",
    )


@pytest.mark.usefixtures("upgraded")
def test_changes_are_listed_and_their_log_is_verified(sluice: Sluice) -> None:
    sluice("tenants", "suspend", "acme")
    heading, *rows = sluice("audit", "list", "--tenant", "acme").stdout.splitlines()
    assert heading.split() == ["NO", "TIME", "ACTOR", "ACTION", "TENANT", "SUBJECT", "DETAILS"]
    assert ["tenant.suspend" in row for row in rows[:2]] == [True, False]
    assert "cli:" in rows[0]
    listed = shown(sluice("audit", "list", "--action", "tenant.create", "--json"))
    assert [(each["sequence"], each["subject"]) for each in listed] == [(1, "acme")]
    whole = sluice("audit", "verify")
    assert whole.exit_code == 0
    head = whole.stdout.split()[-1].rstrip(".")
    assert shown(sluice("audit", "verify", "--json")) == {
        "entries": 2,
        "head": head,
        "broken_at": None,
        "reason": "",
        "has_expected": True,
        "signed": None,
        "lost_head": None,
        "unprotected": [],
    }
    sluice("tenants", "activate", "acme")
    assert sluice("audit", "verify", "--expect", head.upper()).exit_code == 0


@pytest.mark.usefixtures("upgraded")
def test_signatures_and_stored_heads_are_checked(
    sluice: Sluice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = tmp_path / "heads"
    heads.write_text("")
    without_key = sluice("audit", "verify", "--heads", str(heads))
    assert (without_key.exit_code, "requires SLUICE_AUDIT_KEY" in without_key.stderr) == (2, True)
    key = "a key of thirty-two characters or more"
    monkeypatch.setenv("SLUICE_AUDIT_KEY", key)
    without_heads = sluice("audit", "verify", "--heads", str(heads))
    assert (without_heads.exit_code, "no signed head" in without_heads.stderr) == (2, True)
    unsigned = sluice("audit", "verify")
    assert (unsigned.exit_code, "entries of the audit log is signed" in unsigned.stderr) == (
        1,
        True,
    )

    async def sign() -> SignedHead | None:
        database = Database(f"sqlite+aiosqlite:///{tmp_path / 'data' / 'sluice.db'}")
        try:
            async with database.writing() as transaction:
                return await AuditLog(transaction).sign(HeadSigner([key]))
        finally:
            await database.aclose()

    head = asyncio.run(sign())
    assert head is not None
    heads.write_text(f"2026-11-23 INFO gateway.jobs.audit_heads: {head}\n")
    whole = sluice("audit", "verify", "--heads", str(heads))
    assert f"{head.sequence} of them signed" in whole.stdout
    heads.write_text(f"{HeadSigner([key]).sign(9, bytes(32))}\n")
    lost = sluice("audit", "verify", "--heads", str(heads))
    assert (lost.exit_code, "entry 9 does not match" in lost.stderr) == (1, True)


@pytest.mark.usefixtures("upgraded")
def test_tampering_with_the_log_is_exit_code_1_and_names_the_row(
    sluice: Sluice, tmp_path: Path
) -> None:
    sluice("tenants", "suspend", "acme")
    head = shown(sluice("audit", "verify", "--json"))["head"]
    with sqlite3.connect(tmp_path / "data" / "sluice.db") as connection:
        connection.execute("DROP TRIGGER audit_log_no_update")
        connection.execute("DROP TRIGGER audit_log_no_delete")
        connection.execute("DELETE FROM audit_log WHERE sequence = 2")
    connection.close()
    unprotected = sluice("audit", "verify")
    assert unprotected.exit_code == 1
    assert unprotected.stderr.startswith("Error: Rows can be changed in audit_log: triggers")
    cut = sluice("audit", "verify", "--expect", head)
    assert cut.exit_code == 1
    assert "The audit log was truncated" in cut.stderr
    with sqlite3.connect(tmp_path / "data" / "sluice.db") as connection:
        connection.execute("UPDATE audit_log SET actor = 'cli:mallory'")
    connection.close()
    changed = sluice("audit", "verify")
    assert changed.exit_code == 1
    assert "row 1 was changed" in changed.stderr
    as_json = sluice("audit", "verify", "--json")
    assert as_json.exit_code == 1
    shown_state = json.loads(as_json.stdout)
    assert (shown_state["broken_at"], shown_state["unprotected"]) == (1, ["audit_log"])
