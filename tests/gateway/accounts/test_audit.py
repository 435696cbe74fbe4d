"""The audit log: a chain without gaps under concurrent changes, which reveals tampering."""

import asyncio
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, insert, text, update
from sqlalchemy.exc import DBAPIError

from gateway.accounts.audit import log as audit
from gateway.accounts.audit.log import (
    SIGNED,
    AuditLog,
    AuditLogBrokenError,
    AuditService,
    ChainState,
    HeadSigner,
    SignedHead,
    row_hash,
)
from gateway.platform.database.engine import Database
from gateway.platform.database.partitions import make_partitions
from gateway.platform.database.tables import AuditRow
from gateway.records.errors import StoreUnavailableError
from gateway.records.times import utc_now
from tests.support.kinds import every_database

MEBIBYTE = 1 << 20
KEY = "a key of thirty-two characters or more"
SIGNER = HeadSigner([KEY])


async def append(database: Database, number: int = 1, **fields: Any) -> None:
    """Add rows, each in a separate transaction."""
    for index in range(number):
        async with database.writing() as transaction:
            await AuditLog(transaction).append(
                fields.get("action", "key.create"),
                fields.get("subject", f"key_{index}"),
                actor=fields.get("actor", "system"),
                tenant_id=fields.get("tenant_id", "acme"),
                details={"name": "web site", "number": index},
            )


async def check(database: Database, expected_hash: str | None = None) -> ChainState:
    """Verify the whole log."""
    return await AuditService(database).verify(expected_hash=expected_hash)


async def disarm(database: Database) -> None:
    """Remove the triggers, as an owner of the database can."""
    drops = ["DROP TRIGGER audit_log_no_update", "DROP TRIGGER audit_log_no_delete"]
    if database.engine.dialect.name == "postgresql":
        drops = ["DROP TRIGGER audit_log_append_only ON audit_log"]
    for drop in drops:
        await execute(database, text(drop))


async def execute(database: Database, statement: Any) -> None:
    """Run one statement."""
    async with database.writing() as transaction:
        await transaction.execute(statement)


async def row(database: Database, sequence: int) -> AuditRow:
    """Return one row."""
    async with database.reading() as transaction:
        found = await transaction.get(AuditRow, sequence)
    assert found is not None
    return found


@every_database
async def test_chain_of_untouched_rows_is_whole(database: Database) -> None:
    assert await check(database) == ChainState(0, bytes(32).hex(), None, unprotected=[])
    await append(database, 5)
    state = await check(database)
    assert (state.entries, state.broken_at, state.has_expected) == (5, None, True)
    assert state.head == (await row(database, 5)).hash.hex()
    await append(database)
    assert (await check(database)).head != state.head


CHANGES: dict[str, Callable[[AuditRow], dict[str, Any]]] = {
    "time": lambda row: {"at": row.at + timedelta(microseconds=1)},
    "actor": lambda _: {"actor": "cli:mallory"},
    "action": lambda _: {"action": "key.revoke"},
    "tenant": lambda _: {"tenant_id": "other"},
    "no tenant": lambda _: {"tenant_id": None},
    "subject": lambda row: {"subject": f"{row.subject}x"},
    "details": lambda row: {"details": row.details.replace("web", "Web")},
    "order of details": lambda _: {"details": '{"number":2,"name":"web site"}'},
    "hash": lambda row: {"hash": bytes([row.hash[0] ^ 1]) + row.hash[1:]},
    "previous hash": lambda row: {"previous_hash": row.hash},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_changed_row_is_named(
    database: Database, change: Callable[[AuditRow], dict[str, Any]]
) -> None:
    await append(database, 5)
    await disarm(database)
    values = change(await row(database, 3))
    await execute(database, update(AuditRow).where(AuditRow.sequence == 3).values(**values))
    state = await check(database)
    assert (state.entries, state.broken_at) == (2, 3)
    assert "row 3" in state.reason


async def test_changed_row_with_a_fitting_hash_breaks_the_next_one(database: Database) -> None:
    await append(database, 5)
    await disarm(database)
    forged = await row(database, 3)
    forged.actor = "cli:mallory"
    values = {"actor": forged.actor, "hash": row_hash(forged)}
    await execute(database, update(AuditRow).where(AuditRow.sequence == 3).values(**values))
    assert await check(database) == ChainState(
        3,
        row_hash(forged).hex(),
        4,
        "row 4 does not continue the previous row",
        unprotected=["audit_log"],
    )


@pytest.mark.parametrize(("removed", "broken_at"), [(1, 1), (3, 3)])
async def test_removed_row_is_detected(database: Database, removed: int, broken_at: int) -> None:
    await append(database, 5)
    await disarm(database)
    await execute(database, delete(AuditRow).where(AuditRow.sequence == removed))
    state = await check(database)
    assert (state.broken_at, state.reason) == (broken_at, f"row {broken_at} is missing")


async def test_rows_that_moved_up_after_a_removal_do_not_pass(database: Database) -> None:
    await append(database, 5)
    await disarm(database)
    await execute(database, delete(AuditRow).where(AuditRow.sequence == 3))
    for sequence in (4, 5):
        moved = update(AuditRow).where(AuditRow.sequence == sequence)
        await execute(database, moved.values(sequence=sequence - 1))
    assert (await check(database)).broken_at == 3


async def test_swapped_rows_do_not_pass(database: Database) -> None:
    await append(database, 4)
    await disarm(database)
    for old, new in ((2, 9), (3, 2), (9, 3)):
        await execute(
            database, update(AuditRow).where(AuditRow.sequence == old).values(sequence=new)
        )
    assert (await check(database)).broken_at == 2


async def test_row_slipped_in_at_the_end_does_not_pass_without_the_right_hashes(
    database: Database,
) -> None:
    await append(database, 2)
    values = {
        "sequence": 3,
        "at": utc_now(),
        "actor": "system",
        "action": "key.create",
        "tenant_id": None,
        "subject": "x",
        "details": "{}",
        "previous_hash": bytes(32),
        "hash": bytes(32),
    }
    await execute(database, insert(AuditRow).values(**values))
    assert (await check(database)).broken_at == 3


async def test_truncated_log_is_detected_by_a_stored_hash(database: Database) -> None:
    await append(database, 5)
    noted = (await check(database)).head
    await append(database, 2)
    assert (await check(database, noted)).has_expected
    await disarm(database)
    await execute(database, delete(AuditRow).where(AuditRow.sequence >= 5))
    state = await check(database, noted)
    assert (state.entries, state.broken_at, state.has_expected) == (4, None, False)
    assert not (await check(database, "no hash at all")).has_expected


async def make_anew(database: Database, sequences: Iterable[int]) -> None:
    """Change consecutive rows so that all hashes match."""
    await disarm(database)
    previous: bytes | None = None
    for sequence in sequences:
        forged = await row(database, sequence)
        forged.actor, forged.previous_hash = "cli:mallory", previous or forged.previous_hash
        forged.hash = previous = row_hash(forged)
        values = {
            "actor": forged.actor,
            "previous_hash": forged.previous_hash,
            "hash": forged.hash,
        }
        await execute(
            database, update(AuditRow).where(AuditRow.sequence == sequence).values(**values)
        )


async def test_rewritten_chain_is_detected_by_a_stored_hash(database: Database) -> None:
    await append(database, 5)
    noted = (await check(database)).head
    await make_anew(database, (3, 4, 5))
    state = await check(database, noted)
    assert (state.entries, state.broken_at, state.has_expected) == (5, None, False)


# -- signed heads --------------------------------------------------------------------------------


async def sign(
    database: Database, signer: HeadSigner = SIGNER, *, after: SignedHead | None = None
) -> SignedHead | None:
    """Sign the newest row."""
    async with database.writing() as transaction:
        return await AuditLog(transaction).sign(signer, after=after)


async def verify(
    database: Database, *noted: SignedHead, signer: HeadSigner = SIGNER
) -> tuple[int | None, int | None, int | None]:
    """Return the broken row, the number of signed rows, and the first missing head."""
    state = await AuditService(database).verify(signer=signer, noted=noted)
    return state.broken_at, state.signed, state.lost_head


async def signed(database: Database) -> SignedHead:
    """Sign the newest row of a log that has some."""
    head = await sign(database)
    assert head is not None
    return head


@every_database
async def test_each_head_is_signed_once(database: Database) -> None:
    assert await sign(database) is None
    await append(database, 3)
    assert await verify(database) == (None, 0, None)
    heads = await asyncio.gather(signed(database), signed(database))
    assert heads[0] == heads[1]
    assert (heads[0].sequence, heads[0].hash) == (3, (await row(database, 3)).hash.hex())
    assert await verify(database, *heads) == (None, 3, None)
    await append(database)
    assert (await signed(database)).sequence == 5
    assert await verify(database, *heads) == (None, 5, None)


async def test_rewritten_chain_has_no_valid_signature(database: Database) -> None:
    await append(database, 3)
    head = await signed(database)
    await append(database)
    await make_anew(database, range(2, 6))
    assert (await check(database)).broken_at is None
    assert await verify(database, head) == (4, None, None)
    with pytest.raises(AuditLogBrokenError, match="row 4"):
        await sign(database)


async def test_removed_signatures_are_detected(database: Database) -> None:
    await append(database, 3)
    head = await signed(database)
    await disarm(database)
    await execute(database, delete(AuditRow).where(AuditRow.sequence >= 3))
    await append(database, 2)
    assert await verify(database) == (None, 0, None)
    assert await verify(database, head) == (None, 0, 3)
    with pytest.raises(AuditLogBrokenError, match="row 3"):
        await sign(database, after=head)
    await execute(database, delete(AuditRow))
    with pytest.raises(AuditLogBrokenError, match="row 3"):
        await sign(database, after=head)


async def test_signature_is_bound_to_its_key_and_its_row(database: Database) -> None:
    await append(database)
    head = await signed(database)
    other, rotated = HeadSigner(["another key" * 4]), HeadSigner(["another key" * 4, KEY])
    assert await verify(database, signer=other) == (2, None, None)
    assert await verify(database, head, signer=rotated) == (None, 1, None)
    forged = replace(head, sequence=2, hash=(await row(database, 2)).hash.hex())
    assert await verify(database, forged) == (None, 1, 2)
    async with database.writing() as transaction:
        log = AuditLog(transaction)
        await log.append(SIGNED, "1", actor="system", details=head.details)
    assert await verify(database) == (3, None, None)


@pytest.mark.parametrize("details", ["{}", "no json", '{"sequence":1,"hash":"é","signature":"é"}'])
async def test_fake_signature_entry_is_no_signature(database: Database, details: str) -> None:
    await append(database, 2)
    await disarm(database)
    forged = await row(database, 2)
    forged.action, forged.details = SIGNED, details
    values = {"action": SIGNED, "details": details, "hash": row_hash(forged)}
    await execute(database, update(AuditRow).where(AuditRow.sequence == 2).values(**values))
    assert (await check(database)).broken_at is None
    assert await verify(database) == (2, None, None)


def test_heads_are_found_in_any_log() -> None:
    head = SIGNER.sign(17, bytes(range(32)))
    lines = ("noise audit-head 1 zz", f'{{"message": "{head}", "level": "INFO"}}', f"{head}")
    assert SignedHead.all_in("\n".join(lines)) == [head, head]


@every_database
async def test_entries_are_numbered_by_tenant(database: Database) -> None:
    for number in range(10):
        tenant = "acme" if number % 2 else "other"
        action = "key.revoke" if number % 3 == 0 else "key.create"
        await append(database, tenant_id=tenant, action=action)
    service = AuditService(database)

    async def numbers(tenant_id: str, **wanted: Any) -> tuple[list[int], bool]:
        asked = {"action": None, "before": None, "limit": 100} | wanted
        page = await service.page_of(tenant_id, **asked)
        return [entry.sequence for entry in page.entries], page.has_more

    assert await numbers("acme") == ([5, 4, 3, 2, 1], False)
    assert await numbers("other", action="key.revoke") == ([4, 1], False)
    assert await numbers("acme", limit=2) == ([5, 4], True)
    assert await numbers("acme", limit=2, before=4) == ([3, 2], True)
    assert await numbers("nobody") == ([], False)


@every_database
@pytest.mark.parametrize("statement", ["UPDATE audit_log SET actor = 'x'", "DELETE FROM audit_log"])
async def test_database_refuses_to_change_or_remove_rows(
    database: Database, statement: str
) -> None:
    await append(database, 2)
    with pytest.raises((StoreUnavailableError, DBAPIError)) as caught:
        await execute(database, text(statement))
    cause = caught.value.__cause__ or caught.value
    assert "rows of audit_log are only ever added" in str(cause)
    assert (await check(database)).entries == 2


async def partition(database: Database) -> str:
    """Return a partition of the ledger, which SQLite does not have."""
    async with database.writing() as transaction:
        [made] = await make_partitions(transaction, [datetime(2031, 5, 1, tzinfo=UTC)])
    return made


DROP = "DROP TRIGGER credits_append_only ON credits"
CREATE = (
    "CREATE TRIGGER credits_append_only BEFORE UPDATE OR DELETE ON credits FOR EACH ROW {} "
    "EXECUTE FUNCTION sluice_append_only()"
)
REPLACE = (
    "CREATE OR REPLACE FUNCTION sluice_append_only() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RETURN NEW; END $$"
)


@every_database
async def test_tables_without_their_triggers_are_named(database: Database) -> None:
    cases: dict[str, tuple[tuple[str, ...], list[str]]] = {
        "dropped": (("DROP TRIGGER prices_no_delete",), ["prices"]),
        "ledger": (("DROP TRIGGER usage_ledger_no_update",), ["prices", "usage_ledger"]),
        "redefined": (
            (
                "DROP TRIGGER credits_no_update",
                "CREATE TRIGGER credits_no_update BEFORE UPDATE ON credits BEGIN SELECT 1; END",
            ),
            ["credits", "prices", "usage_ledger"],
        ),
    }
    if database.engine.dialect.name == "postgresql":
        month = await partition(database)
        disable = "ALTER TABLE {} DISABLE TRIGGER usage_ledger_append_only"
        enable = disable.replace("DISABLE", "ENABLE")
        where = "WHEN (old.note <> 'x')"
        every = ["audit_log", "credits", "price_removals", "prices", "usage_ledger", month]
        cases = {
            "partition": ((disable.format(month),), [month]),
            "ledger": ((disable.format("usage_ledger"),), ["usage_ledger", month]),
            "enabled": ((enable.format("usage_ledger"),), []),
            "of replicas": (
                ("ALTER TABLE prices ENABLE REPLICA TRIGGER prices_append_only",),
                ["prices"],
            ),
            "always": (("ALTER TABLE prices ENABLE ALWAYS TRIGGER prices_append_only",), []),
            "narrowed": ((DROP, CREATE.format(where)), ["credits"]),
            "restored": ((DROP, CREATE.format("")), []),
            "dropped": (("DROP TRIGGER prices_append_only ON prices",), ["prices"]),
            "function": ((REPLACE,), every),
        }
    assert (await check(database)).unprotected == []
    for name, (statements, unprotected) in cases.items():
        for statement in statements:
            await execute(database, text(statement))
        assert (await check(database)).unprotected == unprotected, name


@every_database
async def test_concurrent_changes_keep_the_chain_whole(database: Database) -> None:
    await asyncio.gather(
        *(append(database, 6, actor=f"cli:{writer}", subject=f"s{writer}") for writer in range(5))
    )
    state = await check(database)
    assert (state.entries, state.broken_at) == (30, None)
    page = await AuditService(database).page(actor="cli:3", before=None, limit=100)
    assert [entry.details["number"] for entry in page.entries] == [5, 4, 3, 2, 1, 0]


@every_database
async def test_entries_are_found_by_tenant_actor_and_action_page_by_page(
    database: Database,
) -> None:
    for number in range(12):
        await append(
            database,
            tenant_id="acme" if number % 2 else "other",
            action="key.revoke" if number % 3 == 0 else "key.create",
            actor=f"key:{number % 4}",
        )
    service = AuditService(database)

    async def sequences(limit: int = 100, before: int | None = None, **wanted: str) -> list[int]:
        page = await service.page(**wanted, before=before, limit=limit)
        return [entry.sequence for entry in page.entries]

    assert await sequences(tenant_id="acme") == [12, 10, 8, 6, 4, 2]
    assert await sequences(action="key.revoke") == [10, 7, 4, 1]
    assert await sequences(actor="key:1", tenant_id="acme", action="key.create") == [6, 2]
    assert await sequences(tenant_id="nobody") == []
    first = await service.page(tenant_id="acme", before=None, limit=4)
    assert (len(first.entries), first.has_more) == (4, True)
    last = await service.page(tenant_id="acme", before=6, limit=2)
    assert ([entry.sequence for entry in last.entries], last.has_more) == ([4, 2], False)


@every_database
@pytest.mark.parametrize(
    ("number", "page"),
    [(1_000, 100), pytest.param(10_000, audit.PAGE, marks=pytest.mark.long)],
)
async def test_log_of_ten_mebibytes_is_verified_in_bounded_memory(
    database: Database, number: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "PAGE", page)
    note = "x" * (10 * MEBIBYTE // number)
    previous, rows = audit.BEGINNING, []
    for sequence in range(1, number + 1):
        made = AuditRow(
            sequence=sequence,
            at=utc_now(),
            actor="system",
            action="key.create",
            tenant_id="acme",
            subject=f"key_{sequence}",
            details=f'{{"note":"{note}"}}',
            previous_hash=previous,
        )
        made.hash = previous = row_hash(made)
        columns = [column.key for column in AuditRow.__table__.columns]
        rows.append({name: getattr(made, name) for name in columns})
    async with database.writing() as transaction:
        for start in range(0, len(rows), page):
            await transaction.execute(insert(AuditRow), rows[start : start + page])
    head = previous.hex()
    del rows
    tracemalloc.start()
    try:
        state = await check(database)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert state == ChainState(number, head, None, unprotected=[])
    # The details of all rows together need more than ten mebibytes.
    assert peak < 8 * MEBIBYTE
