"""The audit log: who changed what, in a hash chain that reveals tampering.

Each row's hash covers its content and the previous row's hash, so changing, removing or inserting a
row breaks the chain. An attacker who can write to the database can recompute all hashes, but not
the signatures among the rows, by a key that is not in the database. Only a hash or a signed head
stored elsewhere (`gateway.jobs.audit_heads`) reveals that the newest rows were removed.
"""

import hashlib
import hmac
import re
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from sqlalchemy import desc, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased
from typing_extensions import override

from gateway.platform.database.claims import lock_kind
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import Page
from gateway.platform.database.schema import unprotected_tables
from gateway.platform.database.tables import AuditRow
from gateway.records.times import utc_now

SIGNED: Final = "audit.sign"
"""The action of entries whose details are the signed head of the previous entry."""

_DOMAIN: Final = b"sluice audit head"
_TEXT: Final = re.compile(r"audit-head (\d{1,15}) ([0-9a-f]{64}) ([0-9a-f]{64})\b")


@dataclass(frozen=True, slots=True)
class SignedHead:
    """The hash of an entry, which covers all entries up to it."""

    sequence: int
    hash: str
    signature: str

    @override
    def __str__(self) -> str:
        """Return the head in the format that is stored outside the database."""
        return f"audit-head {self.sequence} {self.hash} {self.signature}"

    @property
    def details(self) -> dict[str, Any]:
        """The head as the details of an entry."""
        return {"sequence": self.sequence, "hash": self.hash, "signature": self.signature}

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> "SignedHead | None":
        """Return the head in an entry's details, or None."""
        match details:
            case {"sequence": int(sequence), "hash": str(hash_), "signature": str(signature)}:
                return cls(sequence, hash_, signature)
            case _:
                return None

    @classmethod
    def all_in(cls, text: str) -> "list[SignedHead]":
        """Return every head in a text; other lines are skipped."""
        return [cls(int(number), *rest) for number, *rest in _TEXT.findall(text)]


class HeadSigner:
    """Signs with the first of its keys (HMAC-SHA-256), and accepts signatures by any of them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def sign(self, sequence: int, head: bytes) -> SignedHead:
        """Return the signed hash of an entry."""
        signature = _signature(self._keys[0], sequence, head)
        return SignedHead(sequence, head.hex(), signature)

    def is_genuine(self, head: SignedHead) -> bool:
        """Whether one of the keys made the signature."""
        content = bytes.fromhex(head.hash)
        signatures = [_signature(key, head.sequence, content) for key in self._keys]
        given = head.signature.encode()
        return any(hmac.compare_digest(each.encode(), given) for each in signatures)


def _signature(key: bytes, sequence: int, head: bytes) -> str:
    return hmac.new(key, b"%s %d %s" % (_DOMAIN, sequence, head), hashlib.sha256).hexdigest()


SYSTEM: Final = "system"
"""The actor of automatic changes, such as an expiry."""

CHAIN_LOCK: Final = 7_585_424
"""PostgreSQL advisory lock that serializes the insertion of rows."""
BEGINNING: Final = bytes(32)
"""The hash before the first row."""
PAGE: Final = 1000

_json = msgspec.json.Encoder(order="sorted").encode


class AuditEntryBody(BaseModel):
    """One change."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["audit.entry"] = "audit.entry"
    sequence: int = Field(
        description="1, 2, 3 ... without gaps, within the tenant or, for operators, the whole log."
    )
    at: datetime
    actor: str = Field(
        description="`key:KEY_ID`, `jwt:SUBJECT` or `system`. "
        "Customers see operators as `operator`."
    )
    action: str
    tenant: str | None = Field(validation_alias="tenant_id")
    subject: str = Field(description="Id of the changed object.")
    details: Annotated[dict[str, Any], BeforeValidator(msgspec.json.decode)] = Field(
        description="The new values; never a secret."
    )
    hash: Annotated[str, BeforeValidator(bytes.hex)] = Field(
        description="SHA-256 of this entry and the hash of the previous one."
    )


@dataclass(frozen=True, slots=True)
class ChainState:
    """Result of a check of the whole chain."""

    entries: int
    head: str
    """Hash of the newest row; store it elsewhere to detect removal of the newest rows."""
    broken_at: int | None
    """Sequence number of the first wrong or missing row."""
    reason: str = ""
    has_expected: bool = True
    """Whether a row has the expected hash; checked only in an intact chain."""
    signed: int | None = None
    """Number of rows that the newest signature covers; None if no key was given to check it."""
    lost_head: int | None = None
    """Sequence number of the first stored head that is not in this chain or is wrongly signed."""
    unprotected: Sequence[str] = ()
    """Append-only tables, of usage and money too, whose triggers do not reject changes."""


class AuditLogBrokenError(Exception):
    """The log was tampered with, so its head is not signed."""


class AuditLog:
    """The log, within one transaction, which commits a change together with its row."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def append(
        self,
        action: str,
        subject: str,
        *,
        actor: str,
        tenant_id: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Append a row with the details as JSON. They must not contain secrets."""
        await lock_kind(self._transaction, CHAIN_LOCK)
        last = await self._newest()
        plain = {name: _plain(value) for name, value in (details or {}).items()}
        await self._add_after(last, action, subject, actor, tenant_id, plain)

    async def sign(
        self, signer: HeadSigner, *, after: SignedHead | None = None
    ) -> SignedHead | None:
        """Sign the newest row, unless it is a signature.

        Return the newest signed head; None for an empty log. Raises AuditLogBrokenError if the rows
        after the previous signature are not a valid chain, or if `after`, which this process
        signed, is no longer part of the log.
        """
        await lock_kind(self._transaction, CHAIN_LOCK)
        if after is not None:
            signed = await self._transaction.get(AuditRow, after.sequence)
            if signed is None or signed.hash.hex() != after.hash:
                raise AuditLogBrokenError(f"row {after.sequence} is not the row that was signed")
        newest = await self._newest()
        if newest is None:
            return None
        previous = await self._newest(action=SIGNED)
        expected, head = 1, BEGINNING
        if previous is not None:
            expected, head = previous.sequence, previous.previous_hash
        async for row in self.rows(expected):
            if reason := _fault(row, expected, head) or _signature_fault(row, signer):
                raise AuditLogBrokenError(reason)
            expected, head = row.sequence + 1, row.hash
        if newest.action == SIGNED:
            return _signed_head(newest)
        made = signer.sign(newest.sequence, newest.hash)
        subject = f"{newest.sequence}"
        await self._add_after(newest, SIGNED, subject, SYSTEM, None, made.details)
        return made

    async def entries(
        self, *, before: int | None = None, limit: int = 100, **wanted: str | None
    ) -> list[AuditEntryBody]:
        """Return the newest rows, with the given `tenant_id`, `actor` and `action`."""
        query = select(AuditRow).filter_by(**_given(wanted)).order_by(desc(AuditRow.sequence))
        if before is not None:
            query = query.where(AuditRow.sequence < before)
        return [_entry(row) for row in await self._transaction.scalars(query.limit(limit))]

    async def made_keys(
        self, makers: Collection[str], *, tenant_id: str | None, by_former_secret: bool = False
    ) -> set[str]:
        """Return the ids of keys that other keys made; by default with any of their secrets.

        `tenant_id` is the tenant of the makers; None if they may make keys of any tenant.
        """
        actors = [f"{kind}key:{each}" for each in makers for kind in ("", "operator:")]
        query = select(AuditRow.subject, AuditRow.details).where(
            AuditRow.action == "key.create", AuditRow.actor.in_(actors)
        )
        if tenant_id is not None:
            query = query.where(AuditRow.tenant_id == tenant_id)
        return {
            key_id
            for key_id, details in await self._transaction.execute(query)
            if not by_former_secret or msgspec.json.decode(details).get("is_former_secret")
        }

    async def _newest(self, *, action: str | None = None) -> AuditRow | None:
        query = select(AuditRow).order_by(desc(AuditRow.sequence)).limit(1)
        if action is not None:
            query = query.where(AuditRow.action == action)
        row: AuditRow | None = await self._transaction.scalar(query)
        return row

    async def _add_after(
        self,
        last: AuditRow | None,
        action: str,
        subject: str,
        actor: str,
        tenant_id: str | None,
        details: Mapping[str, Any],
    ) -> None:
        row = AuditRow(
            sequence=1 if last is None else last.sequence + 1,
            at=utc_now(),
            actor=actor[:300],
            action=action,
            tenant_id=tenant_id,
            subject=subject[:300],
            details=_json(details).decode(),
            previous_hash=BEGINNING if last is None else last.hash,
        )
        row.hash = row_hash(row)
        self._transaction.add(row)
        await self._transaction.flush()

    async def rows(self, first: int = 1) -> AsyncIterator[AuditRow]:
        """Yield all rows from a sequence number on."""
        last = first - 1
        while True:
            page = list(
                await self._transaction.scalars(
                    select(AuditRow)
                    .where(AuditRow.sequence > last)
                    .order_by(AuditRow.sequence)
                    .limit(PAGE)
                )
            )
            for row in page:
                yield row
            if len(page) < PAGE:
                return
            last = page[-1].sequence
            self._transaction.expunge_all()


def _given(wanted: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if value is not None}


def row_hash(row: AuditRow) -> bytes:
    """Return the hash that the row must have."""
    content = [
        row.sequence,
        row.at.isoformat(),
        row.actor,
        row.action,
        row.tenant_id,
        row.subject,
        row.details,
    ]
    return hashlib.sha256(row.previous_hash + _json(content)).digest()


def _plain(value: object) -> object:
    match value:
        case Mapping():
            return {str(name): _plain(each) for name, each in value.items()}
        case frozenset():
            return sorted(str(each) for each in value)
        case tuple():
            return [str(each) for each in value]
        case Enum():
            return value.value
        case _:
            return value


def _fault(row: AuditRow, expected: int, head: bytes) -> str:
    if row.sequence != expected:
        return f"row {expected} is missing"
    if row.previous_hash != head:
        return f"row {expected} does not continue the previous row"
    if row.hash != row_hash(row):
        return f"row {expected} was changed"
    return ""


def _signature_fault(row: AuditRow, signer: HeadSigner) -> str:
    if row.action != SIGNED:
        return ""
    head = _signed_head(row)
    is_of_row_before = head is not None and (head.sequence, head.hash) == (
        row.sequence - 1,
        row.previous_hash.hex(),
    )
    if head is None or not is_of_row_before or not signer.is_genuine(head):
        return f"row {row.sequence} has no signature of the previous row by this key"
    return ""


def _signed_head(row: AuditRow) -> SignedHead | None:
    try:
        return SignedHead.of(msgspec.json.decode(row.details))
    except msgspec.DecodeError:
        return None


_entry: Final = AuditEntryBody.model_validate


class AuditService:
    """Shows and verifies the audit log."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(
        self, *, before: int | None, limit: int, **wanted: str | None
    ) -> Page[AuditEntryBody]:
        """Return the newest entries as `AuditLog.entries`, before a sequence number if given."""
        async with self._database.reading() as transaction:
            entries = await AuditLog(transaction).entries(before=before, limit=limit + 1, **wanted)
        return Page(entries[:limit], len(entries) > limit)

    async def page_of(
        self, tenant_id: str, *, action: str | None, before: int | None, limit: int
    ) -> Page[AuditEntryBody]:
        """Return the newest entries of a tenant, numbered 1, 2, 3 ... within the tenant."""
        number = func.row_number().over(order_by=AuditRow.sequence).label("number")
        own = select(AuditRow, number).where(AuditRow.tenant_id == tenant_id).subquery()
        row = aliased(AuditRow, own)
        query = select(row, own.c.number).order_by(desc(own.c.number)).limit(limit + 1)
        if action is not None:
            query = query.where(row.action == action)
        if before is not None:
            query = query.where(own.c.number < before)
        async with self._database.reading() as transaction:
            found = await transaction.execute(query)
            entries = [
                _entry(each).model_copy(update={"sequence": sequence}) for each, sequence in found
            ]
        return Page(entries[:limit], len(entries) > limit)

    async def verify(
        self,
        *,
        expected_hash: str | None = None,
        signer: HeadSigner | None = None,
        noted: Sequence[SignedHead] = (),
    ) -> ChainState:
        """Check every row from the first one, and compare with heads stored elsewhere.

        Checks the triggers of append-only tables, too.

        Args:
            expected_hash: a hash that a row must have.
            signer: checks the signatures among the rows, and those of `noted`.
            noted: signed heads that rows must have; needs a signer.
        """
        expected, head, signed = 1, BEGINNING, 0
        is_found = expected_hash in (None, head.hex())
        lost = {each.sequence for each in noted if signer is None or not signer.is_genuine(each)}
        wanted = {(each.sequence, each.hash) for each in noted}
        async with self._database.reading() as transaction:
            async for row in AuditLog(transaction).rows():
                reason = _fault(row, expected, head)
                if not reason and signer is not None:
                    reason = _signature_fault(row, signer)
                if reason:
                    unprotected = await unprotected_tables(transaction)
                    return ChainState(
                        expected - 1, head.hex(), expected, reason, unprotected=unprotected
                    )
                if row.action == SIGNED:
                    signed = row.sequence - 1
                expected, head = row.sequence + 1, row.hash
                is_found = is_found or head.hex() == expected_hash
                wanted.discard((row.sequence, head.hex()))
            lost.update(sequence for sequence, _ in wanted)
            return ChainState(
                expected - 1,
                head.hex(),
                None,
                has_expected=is_found,
                signed=None if signer is None else signed,
                lost_head=min(lost, default=None),
                unprotected=await unprotected_tables(transaction),
            )
