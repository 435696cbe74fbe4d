"""Export of the ledger to billing systems: frozen batches, sent until the receiver has them."""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import msgspec
from sqlalchemy import and_, false, or_, update
from sqlalchemy.ext.asyncio import AsyncSession
from typing_extensions import override

from gateway.billing.exports.store import MAX_ERROR_CHARACTERS, ExportBatch, ExportStore
from gateway.jobs import telemetry
from gateway.jobs.outbound import DeliveryError, HttpReply, Outbound
from gateway.platform.database.claims import (
    CLAIM,
    TURN_SECONDS,
    Claim,
    LostClaimError,
    Slots,
    claiming,
    lock_in_turns,
)
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import LATE, ExportBatchRow, ExportSinkRow, LedgerRow
from gateway.platform.settings import STRIPE_URL, ExportKind, ExportSink, Settings
from gateway.records.errors import printable
from gateway.records.times import EPOCH, to_ms, utc_now
from gateway.records.usage_record import Counts

TIMEOUT_SECONDS: Final = 30.0
"""Of one request; less than a claim."""
AT_ONCE: Final = 8
"""Sums that are sent concurrently, each of another customer."""
FIRST_PAUSE: Final = timedelta(seconds=5)
"""Pause after a pass that failed; twice as long after each further one."""
LONGEST_PAUSE: Final = timedelta(minutes=5)
LONGEST_RETRY_AFTER: Final = timedelta(hours=1)
ERROR_BYTES: Final = 2000
REJECTIONS: Final = (400, 413, 422)
"""Statuses that concern the events; others concern the sink, such as a wrong token."""

_PATHS: Final = {
    ExportKind.OPENMETER: "/api/v1/events",
    ExportKind.CLOUDEVENTS: "",
    ExportKind.STRIPE: "/v1/billing/meter_events",
    ExportKind.OTLP: "/v1/logs",
}
_INFO: Final = 9
"""Number of the severity in OTLP."""
_DUPLICATE: Final = b"An event already exists with identifier"
"""Stripe responds with 400 to an identifier that it has stored."""

logger = logging.getLogger(__name__)


class Failure(NamedTuple):
    """A failed attempt that concerns the sink."""

    error: str
    retry_after: timedelta


class Exporter(Slots[tuple[ExportSinkRow, Claim]]):
    """Exports the ledger to the sinks of the settings."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._sinks = {sink.name: sink for sink in settings.export_sinks}
        claim = claiming(database, ExportSinkRow.leased_until, self._lock_due)
        super().__init__(len(self._sinks), claim, self._export)
        self._database = database
        self._tokens = settings.tokens_of_sinks
        self._outbound = Outbound(allows_private=True, timeout_seconds=TIMEOUT_SECONDS)
        # Its receiver is the tenant's.
        self._tenants_outbound = Outbound(
            allows_private=settings.webhook_allow_private, timeout_seconds=TIMEOUT_SECONDS
        )
        self._due = set[str]()
        self._seconds = 0.0

    @override
    async def run(self, *, seconds: float = TURN_SECONDS) -> int:
        """Export to each sink until nothing is left, an attempt fails or `seconds` are over.

        A slow sink delays no other one: its attempt continues after the run. Raises
        StoreUnavailableError. Processes that run at once take turns.
        """
        self._due = set(self._sinks)
        self._seconds = seconds
        return await super().run(seconds=seconds)

    async def _lock_due(
        self, transaction: AsyncSession, now: datetime, _limit: int, held: Collection[str]
    ) -> list[ExportSinkRow]:
        """Lock sinks that were not claimed in this run yet."""
        due, self._due = self._due.difference(held), set()
        store, kinds = ExportStore(transaction), dict[str, str]()
        for name in sorted(due):
            kinds[name] = kind = self._sinks[name].kind
            row = await store.register(name, kind, now)
            if row.kind != kind:
                logger.error(
                    "the sink %s is of the kind %s: remove it (`sluice exports remove`), or give "
                    "the new one another name",
                    name,
                    row.kind,
                )
        if not kinds:
            return []
        is_one = (
            and_(ExportSinkRow.name == name, ExportSinkRow.kind == kind)
            for name, kind in kinds.items()
        )
        return await lock_in_turns(
            transaction,
            ExportSinkRow,
            is_due=and_(
                or_(false(), *is_one),
                ExportSinkRow.paused_at.is_(None),
                ExportSinkRow.next_attempt_at <= now,
                ExportSinkRow.leased_until <= now,
            ),
            owners=(ExportSinkRow.name,),
            order=ExportSinkRow.next_attempt_at,
            limit=len(kinds),
        )

    async def _export(self, item: tuple[ExportSinkRow, Claim]) -> bool:
        sink, claim = self._sinks[item[0].name], item[1]
        deadline, had_failed = time.monotonic() + self._seconds, item[0].failures > 0
        try:
            while batches := await self._freeze(sink, claim):
                results = await asyncio.gather(*(self._send(sink, batch) for batch in batches))
                has_failed = any(results)
                if has_failed or had_failed:
                    await self._note(claim, results)
                had_failed = has_failed
                if has_failed or time.monotonic() > deadline:
                    break
            async with claim.changing(leased_until=EPOCH) as transaction:
                await ExportStore(transaction).remove_exported()
        except LostClaimError:
            return False  # The process was slow, and another one exports.
        return True

    async def _freeze(self, sink: ExportSink, claim: Claim) -> list[ExportBatch]:
        """Renew the claim, and commit what is sent next before it is sent."""
        now = utc_now()
        async with claim.changing(leased_until=now + CLAIM) as transaction:
            store = ExportStore(transaction)
            row = await transaction.get_one(ExportSinkRow, sink.name)
            if row.paused_at is not None:
                return []
            if sink.kind is ExportKind.STRIPE:
                await store.freeze_sums(row, now, sink.window)
                await store.release_held(row, now)
            else:
                await store.freeze_requests(row, sink.batch_size)
            for batch_id in await store.stop_uncertain(sink.name, now - sink.retries_end_after):
                logger.error(
                    "batch %d of the sink %s is no longer sent: the sink may have stored it and "
                    "not recognize it",
                    batch_id,
                    sink.name,
                )
            return await store.take(sink.name, now, AT_ONCE, tenant_id=sink.tenant)

    async def _note(self, claim: Claim, results: Sequence[Failure | None]) -> None:
        """Store the pause of a sink after a pass, whose failures count once: they have one cause.

        If the sink has responded to another batch of the pass, the failure counts as the first one.
        """
        failed, now = [each for each in results if each is not None], utc_now()
        async with claim.changing(leased_until=now + CLAIM) as transaction:
            row = await transaction.get_one(ExportSinkRow, claim.key)
            if len(failed) < len(results):
                row.failures, row.last_error, row.next_attempt_at = 0, "", EPOCH
            if failed:
                pause = min(FIRST_PAUSE * 2 ** min(row.failures, 30), LONGEST_PAUSE)
                row.failures, row.last_error = row.failures + 1, failed[0].error
                row.next_attempt_at = now + max(pause, *(each.retry_after for each in failed))

    async def _send(self, sink: ExportSink, batch: ExportBatch) -> Failure | None:
        """Send a batch and record the outcome. Return a failure that concerns the sink."""
        if sink.tenant and not batch.requests:
            await self._delivered(sink, batch)
            return None
        is_otlp = sink.kind is ExportKind.OTLP
        outbound = self._tenants_outbound if is_otlp else self._outbound
        try:
            body, content_type = _body(sink, batch)
        except Exception:
            logger.exception("batch %d of the sink %s cannot be encoded", batch.row.id, sink.name)
            await self._rejected(sink, batch, "cannot be encoded")
            return None
        headers = {"content-type": content_type, "user-agent": "sluice-exports"}
        if token := self._tokens.get(sink.name):
            headers["authorization"] = f"Bearer {token}"
        url = (sink.url or STRIPE_URL).rstrip("/") + _PATHS[sink.kind]
        try:
            reply = await outbound.exchange(
                url, body, headers, error_bytes=ERROR_BYTES, bytes_=ERROR_BYTES * is_otlp
            )
        except DeliveryError as error:
            return await self._failed(sink, batch, str(error), is_certain=not error.was_sent)
        if 200 <= reply.status < 300 or _is_duplicate(sink, reply):
            if is_otlp:
                _note_partial_success(sink, reply)
            await self._delivered(sink, batch)
        elif reply.status in REJECTIONS:
            reason = reply.content.decode(errors="replace").replace("\0", "")
            await self._rejected(sink, batch, f"{reply.status}: {reason}")
        else:
            return await self._failed(
                sink,
                batch,
                f"responded with status {reply.status}",
                # A server may have stored the events before an error of its own.
                is_certain=reply.status < 500,
                retry_after=reply.headers.get("retry-after", ""),
            )
        return None

    async def _delivered(self, sink: ExportSink, batch: ExportBatch) -> None:
        async with self._database.writing() as transaction:
            await ExportStore(transaction).delivered(batch.row.id)
        telemetry.EXPORTED.labels(sink.name, "delivered").inc(len(batch.requests) or 1)

    async def _rejected(self, sink: ExportSink, batch: ExportBatch, reason: str) -> None:
        async with self._database.writing() as transaction:
            is_aside = await ExportStore(transaction).rejected(sink.name, batch, reason)
        if is_aside:
            logger.warning(
                "batch %d of the sink %s was rejected: %s", batch.row.id, sink.name, reason
            )
            telemetry.EXPORTED.labels(sink.name, "rejected").inc()

    async def _failed(
        self,
        sink: ExportSink,
        batch: ExportBatch,
        reason: str,
        *,
        is_certain: bool,
        retry_after: str = "",
    ) -> Failure:
        """Note a failed attempt. `is_certain`: the sink has certainly not stored the batch."""
        error = reason[:MAX_ERROR_CHARACTERS]
        columns: dict[str, Any] = {"last_error": error}
        if is_certain and not batch.was_uncertain:
            columns["uncertain_since"] = None
        is_it = ExportBatchRow.id == batch.row.id
        async with self._database.writing() as transaction:
            await transaction.execute(update(ExportBatchRow).where(is_it).values(**columns))
        telemetry.EXPORTED.labels(sink.name, "failed").inc(len(batch.requests) or 1)
        return Failure(error, _seconds(retry_after))


def _body(sink: ExportSink, batch: ExportBatch) -> tuple[bytes, str]:
    """Return the body of a request and its content type."""
    if sink.kind is ExportKind.STRIPE:
        fields = {
            "event_name": sink.event,
            "identifier": batch.row.identifier,
            "timestamp": to_ms(batch.row.occurred_at) // 1000,
            "payload[stripe_customer_id]": batch.row.customer,
            "payload[value]": batch.row.cost_micros,
        }
        return urlencode(fields).encode(), "application/x-www-form-urlencoded"
    events = [_event(sink, row) for row in batch.requests]
    if sink.kind is ExportKind.OTLP:
        return msgspec.json.encode(_logs(sink, batch.requests, events)), "application/json"
    return msgspec.json.encode(events), "application/cloudevents-batch+json"


_DATA: Final = (
    *("model", "endpoint", "service_tier", "outcome", "cost_micros"),
    *Counts._fields,
    *(f"free_{name}" for name in Counts._fields),
)
"""Data of an event that a row has under the same name."""


def _event(sink: ExportSink, row: LedgerRow) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": row.request_id,
        "source": sink.source,
        "type": sink.event,
        "subject": row.tenant_id,
        "time": _rfc3339(row.created_at),
        "datacontenttype": "application/json",
        "data": {
            "project": row.project_id,
            "key": row.credential_id,
            "prepaid": row.is_prepaid,
            "requests": int(LATE not in row.request_id),
            **{name: getattr(row, name) for name in _DATA},
        },
    }


def _logs(
    sink: ExportSink, rows: Sequence[LedgerRow], events: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return a request of OTLP/HTTP in JSON, with a log record for each event."""
    records = [
        {
            "timeUnixNano": str(1_000_000 * to_ms(row.created_at)),
            "observedTimeUnixNano": str(1_000_000 * to_ms(row.ended_at)),
            "severityNumber": _INFO,
            "severityText": "INFO",
            "eventName": sink.event,
            "body": {"stringValue": row.request_id},
            "attributes": [
                _attribute("log.record.uid", row.request_id),
                *_attributes(
                    {"request_id": row.request_id, "tenant": row.tenant_id, **event["data"]}
                ),
            ],
        }
        for row, event in zip(rows, events, strict=True)
    ]
    resource = {"attributes": [_attribute("service.name", sink.source)]}
    scope = {"name": "sluice.usage", "version": "1"}
    scopes = [{"scope": scope, "logRecords": records}]
    return {"resourceLogs": [{"resource": resource, "scopeLogs": scopes}]}


def _attributes(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_attribute(f"sluice.{name}", each) for name, each in data.items() if each is not None]


def _attribute(name: str, value: str | int) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"key": name, "value": {"boolValue": value}}
    # OTLP has integers as texts: they may have 64 bits.
    kind = "intValue" if isinstance(value, int) else "stringValue"
    return {"key": name, "value": {kind: str(value)}}


def _note_partial_success(sink: ExportSink, reply: HttpReply) -> None:
    """Count the records that a receiver has dropped of a request, which must not be repeated."""
    try:
        found = msgspec.json.decode(reply.content or b"{}", type=_Reply).partialSuccess
        dropped = int(found.rejectedLogRecords) if found is not None else 0
    except (ValueError, msgspec.MsgspecError):
        return  # Such as a text, or protobuf.
    if found is not None and dropped > 0:
        reason = printable(found.errorMessage)[:MAX_ERROR_CHARACTERS]
        logger.warning("the sink %s has dropped %d records: %s", sink.name, dropped, reason)
        telemetry.EXPORTED.labels(sink.name, "rejected").inc(dropped)


class _PartialSuccess(msgspec.Struct):
    rejectedLogRecords: int | str = 0  # noqa: N815 - the name in OTLP.
    errorMessage: str = ""  # noqa: N815


class _Reply(msgspec.Struct):
    partialSuccess: _PartialSuccess | None = None  # noqa: N815


def _rfc3339(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _is_duplicate(sink: ExportSink, reply: HttpReply) -> bool:
    is_stripes = sink.kind is ExportKind.STRIPE and reply.status == REJECTIONS[0]
    return is_stripes and _DUPLICATE in reply.content


def _seconds(retry_after: str) -> timedelta:
    if not (retry_after.isascii() and retry_after.isdigit()):
        return timedelta(0)
    return min(timedelta(seconds=int(retry_after[:9])), LONGEST_RETRY_AFTER)
