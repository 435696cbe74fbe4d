"""Batches of messages, as Anthropic's API has them: `/v1/messages/batches`.

They are batches of the endpoint `/v1/messages` whose requests come in the body. The gateway writes
the input file, and reads the result files in Anthropic's form.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from sqlalchemy import ColumnElement, delete
from typing_extensions import override

from common.not_none import not_none
from gateway.accounts.routes_common import PLAIN
from gateway.batches.file_checker import MAX_MODELS, METHOD
from gateway.batches.files.routes import (
    MEDIA_TYPE,
    After,
    CallerPrincipal,
    OwnerOfFiles,
    caller_principal,
)
from gateway.batches.files.service import Bound, Owner
from gateway.batches.finishing import end_code_of
from gateway.batches.lines import (
    MESSAGE_ENDS,
    InputLine,
    custom_id_of,
    failed,
    message_result,
    unfinished,
)
from gateway.batches.routes import BatchId, BatchService, in_header_dialect, new_batch
from gateway.dialects.endpoint import ANTHROPIC_PREFIX, MESSAGES
from gateway.dialects.json_types import Schema, reference
from gateway.http.body import BodyReader
from gateway.http.connection import Stream
from gateway.http.services import made, provided
from gateway.platform.concurrency.large_work import LargeWork
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import PageRequest
from gateway.platform.database.tables import BatchRow
from gateway.platform.settings import Settings
from gateway.records.batches import MESSAGE_BATCH, Batch, BatchStatus, File
from gateway.records.errors import (
    BadRequestError,
    ErrorStyle,
    InvalidParameterError,
    NotFoundError,
    StateConflictError,
    invalid,
    must,
    shown,
)
from gateway.records.principal import Principal
from gateway.records.times import utc_now

CUSTOM_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MOST_OF_PAGE: Final = 1_000
"""Both as in Anthropic's API."""
PIECE_BYTES: Final = 1024 * 1024
"""After so many bytes, another object of the input file begins: copies take about a millisecond."""
RESULTS_AT_ONCE: Final = 100
"""Result lines that are converted at a time."""
_PATH: Final = f"{MESSAGES.path}/batches"


class _Creation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: list[msgspec.Raw]


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    params: msgspec.Raw


class _Params(msgspec.Struct, frozen=True):
    model: object = None


_CREATION: Final = msgspec.json.Decoder(_Creation)
_REQUEST: Final = msgspec.json.Decoder(_Request)
_PARAMS: Final = msgspec.json.Decoder(_Params)


def read_requests(
    content: bytes | bytearray, size: Bound, lines: Bound, *, most_bytes: int
) -> tuple[list[bytearray], int]:
    """Return the input file of a body `{requests: [{custom_id, params}]}` in pieces, and its lines.

    A request has at most `most_bytes`. What is wrong inside of `params` concerns its own result
    only. Raises InvalidParameterError.
    """
    with _reading("requests"):
        requests = _CREATION.decode(content).requests
    if not 0 < len(requests) <= lines.most:
        raise InvalidParameterError(
            f"'requests' must have at least one request. {lines.message} Given: {len(requests)}.",
            param="requests",
        )
    pieces = [bytearray()]
    custom_ids, models = set[str](), set[str]()
    for number, raw in enumerate(map(bytes, requests)):
        path = f"requests.{number}"
        if len(raw) > most_bytes:
            raise must(path, f"have at most {most_bytes} bytes", len(raw))
        with _reading(path):
            request = _REQUEST.decode(raw.decode())
        if CUSTOM_ID.fullmatch(request.custom_id) is None:
            rule = "be 1 to 64 letters, digits, hyphens and underscores"
            raise must(f"{path}.custom_id", rule, request.custom_id)
        if request.custom_id in custom_ids:
            raise must(f"{path}.custom_id", "differ from those before it", request.custom_id)
        custom_ids.add(request.custom_id)
        with _reading(f"{path}.params"):
            model = _PARAMS.decode(request.params).model
        models.add(model if isinstance(model, str) else "")
        # JSON has line ends only between tokens.
        params = msgspec.Raw(bytes(request.params).replace(b"\n", b" ").replace(b"\r", b" "))
        line = InputLine(request.custom_id, METHOD, MESSAGES.path, params)
        if len(pieces[-1]) >= PIECE_BYTES:
            pieces.append(bytearray())
        pieces[-1] += msgspec.json.encode(line) + b"\n"
    if (total := sum(map(len, pieces))) > size.most:
        raise InvalidParameterError(f"{size.message} Given: {total}.", param="requests")
    if len(models) > MAX_MODELS:
        raise must("requests", f"have at most {MAX_MODELS} different models", len(models))
    return pieces, len(requests)


@contextmanager
def _reading(param: str) -> Iterator[None]:
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(param, f"cannot be read: {error}.") from None


class MessageBatchService(BatchService):
    """Message batches of all tenants. All methods raise StoreUnavailableError."""

    def __init__(self, settings: Settings, database: Database, large_work: LargeWork) -> None:
        super().__init__(settings, database)
        self._large_work = large_work
        self._most_bytes = settings.max_body_bytes

    @override
    def _visible(self, owner: Owner) -> list[ColumnElement[bool]]:
        is_of_messages = BatchRow.id.startswith(MESSAGE_BATCH, autoescape=True)
        return [*super()._visible(owner), is_of_messages]

    async def run(self, principal: Principal, body: bytes | bytearray) -> Batch:
        """Create a batch of the requests in a body. After an error nothing is stored.

        Raises InvalidParameterError, TenantQueueFullError and StateConflictError.
        """
        owner = Owner(principal.tenant_id, principal.project_id)
        size, lines = await self._files.require_room(owner.tenant_id)
        read = partial(read_requests, body, size, lines, most_bytes=self._most_bytes)
        pieces, number = await self._large_work.of(owner.tenant_id, size=len(body))(read)
        file = await self._files.begin_upload(owner)
        try:
            parts = [(await self._files.put(file.id, bytes(each)), len(each)) for each in pieces]
            batch = new_batch(
                MESSAGE_BATCH,
                principal,
                endpoint=MESSAGES.path,
                input_file_id=file.id,
                completion_window=self.windows[0],
                labels=None,
                output_seconds=None,
                total=number,
            )
            await self._files.finish_upload(
                file,
                parts,
                name=f"{batch.id}_input.jsonl",
                lines=number,
                retention=None,
                also=partial(self.add, batch),
            )
        except BaseException:
            await asyncio.shield(self._files.remove(file.id))
            raise
        return batch

    async def delete(self, owner: Owner, batch_id: str) -> None:
        """Delete a batch that has ended, with its files. Safe to repeat.

        Raises NotFoundError, and StateConflictError if it has not ended or a batch needs its input.
        """
        batch = await self.get(owner, batch_id)
        if not batch.status.is_end:
            raise StateConflictError(
                f"The batch {shown(batch_id)} cannot be deleted: it is {batch.status}. "
                "Cancel it, and wait until it has ended."
            )
        for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                with suppress(NotFoundError):
                    await self._files.delete(owner, file_id)
        async with self._database.writing() as transaction:
            await transaction.execute(delete(BatchRow).where(BatchRow.id == batch.id))

    async def results(self, owner: Owner, batch_id: str) -> AsyncIterator[bytes]:
        """Return the pieces of a batch's results, in Anthropic's form.

        Raises NotFoundError, also if it has not ended or its files have expired.
        """
        batch = await self.get(owner, batch_id)
        if not batch.status.is_end:
            message = f"The batch {shown(batch_id)} has no results yet: it is {batch.status}."
            raise NotFoundError(message)
        ids = batch.output_file_id, batch.error_file_id
        if batch.in_progress_at is None:
            ids = batch.input_file_id, None
        files = [await self._files.get(owner, file_id) for file_id in ids if file_id is not None]
        return self._pieces(batch, files)

    async def _pieces(self, batch: Batch, files: list[File]) -> AsyncIterator[bytes]:
        beside = self._large_work.of(batch.tenant_id, size=0)
        for file in files:
            async for lines in self._files.reader.lines(file.id, file.size):
                for start in range(0, len(lines), RESULTS_AT_ONCE):
                    part = lines[start : start + RESULTS_AT_ONCE]
                    yield await beside(partial(_results, batch, part), size=sum(map(len, part)))


def _results(batch: Batch, lines: list[bytes]) -> bytes:
    """Return the results of lines of a result file, or of the input if no line has begun."""
    if batch.in_progress_at is None:
        lines = [_unbegun(batch, custom_id_of(line)) for line in lines]
    return b"".join(map(message_result, lines))


def _unbegun(batch: Batch, custom_id: str) -> bytes:
    if batch.status is not BatchStatus.FAILED:
        return unfinished("", custom_id, end_code_of(batch)).content
    error, style = BadRequestError(not_none(batch.errors)[0]["message"]), ErrorStyle.ANTHROPIC
    return failed("", custom_id, request_id="", error=error, style=style).content


def body_of(batch: Batch, settings: Settings) -> dict[str, Any]:
    """Return a message batch as Anthropic's API shows it."""
    ends = batch.completed_at, batch.cancelled_at, batch.failed_at, batch.expired_at
    ended_at = next(filter(None, ends)) if batch.status.is_end else None
    kept_until = ended_at and ended_at + settings.file_retention
    is_gone = kept_until is not None and kept_until <= utc_now()
    status, counts = "in_progress", dict.fromkeys(_COUNTS, 0)
    if ended_at is None:
        others = "processing"
        if batch.status is BatchStatus.CANCELLING:
            status = "canceling"
    else:
        status, others = "ended", MESSAGE_ENDS[end_code_of(batch)]
        counts |= {"succeeded": batch.completed, "errored": batch.failed - batch.unfinished}
        if batch.status is BatchStatus.FAILED:
            others = "errored"
    # Lines of a batch that ended before they were checked are in no count of its own.
    counts[others] += batch.total - sum(counts.values())
    url = f"{settings.public_url or ''}{_PATH}/{batch.id}/results"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": counts,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        "cancel_initiated_at": batch.cancelling_at,
        "ended_at": ended_at,
        "archived_at": kept_until if is_gone else None,
        "results_url": None if ended_at is None or is_gone else url,
    }


_COUNTS: Final = ("processing", "succeeded", "errored", "canceled", "expired")
_JSON: Final = "application/json"


def _responds(schema: Schema, media_type: str = _JSON) -> dict[str, Any]:
    """Return the arguments of a route that describe its response."""
    content = {"content": {media_type: {"schema": schema}}, "description": "Success"}
    return {"responses": {200: content}, "response_class": Response}


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type=_JSON)


_BATCH: Final = _responds(reference("MessageBatch"))
_LIST: Final = _responds(reference("MessageBatchList"))
_DELETED: Final = _responds(reference("DeletedMessageBatch"))
_RESULTS: Final = _responds({"type": "string"}, MEDIA_TYPE)
_CREATED: Final = {_JSON: {"schema": reference("MessageBatchCreation")}}
_BODY: Final = {"requestBody": {"required": True, "content": _CREATED}}

_routes = APIRouter(prefix=_PATH, tags=["Batches"])

MessageBatches = Annotated[MessageBatchService, made(MessageBatchService)]
Configured = Annotated[Settings, provided(Settings)]


@_routes.post("", summary="Create a message batch", openapi_extra=_BODY, **_BATCH)
async def create_message_batch(
    request: Request,
    settings: Configured,
    bodies: Annotated[BodyReader, provided(BodyReader)],
    batches: MessageBatches,
    principal: CallerPrincipal,
) -> Response:
    """Run requests to `/v1/messages`, at the price of the tier batch.

    A request whose `params` are invalid gets the result `errored`. The batch and its files are also
    listed by `/v1/batches` and `/v1/files`, and count like others.
    """
    content = await bodies.read(request, sender=principal.tenant_id)
    batch = await batches.run(in_header_dialect(request, principal, settings), content)
    return _json(body_of(batch, settings))


@_routes.get("", summary="List message batches", **_LIST)
async def list_message_batches(
    settings: Configured,
    batches: MessageBatches,
    owner: OwnerOfFiles,
    after_id: After = None,
    before_id: Annotated[
        str | None, Query(min_length=1, max_length=63, description="`first_id` of the page after.")
    ] = None,
    limit: Annotated[
        int, Query(ge=1, le=MOST_OF_PAGE, description="Maximum entries of one page."), PLAIN
    ] = 20,
) -> Response:
    """List message batches, newest first, after or before one of them."""
    if after_id is not None and before_id is not None:
        raise must("before_id", "be absent if 'after_id' is given", before_id)
    wanted = PageRequest(after_id, limit, is_newest_first=True, param="after_id")
    if before_id is not None:
        wanted = PageRequest(before_id, limit, param="before_id")
    page = await batches.page(owner, wanted)
    found = page.entries if before_id is None else page.entries[::-1]
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    data = [body_of(each, settings) for each in found]
    return _json({"data": data, "has_more": page.has_more, "first_id": first, "last_id": last})


@_routes.get("/{batch_id}", summary="Get a message batch", **_BATCH)
async def get_message_batch(
    settings: Configured, batches: MessageBatches, owner: OwnerOfFiles, batch_id: BatchId
) -> Response:
    """Get a message batch."""
    return _json(body_of(await batches.get(owner, batch_id), settings))


@_routes.post("/{batch_id}/cancel", summary="Cancel a message batch", **_BATCH)
async def cancel_message_batch(
    settings: Configured, batches: MessageBatches, owner: OwnerOfFiles, batch_id: BatchId
) -> Response:
    """Cancel a message batch. Requests that have not ended are not charged."""
    return _json(body_of(await batches.cancel(owner, batch_id), settings))


@_routes.delete("/{batch_id}", summary="Delete a message batch", **_DELETED)
async def delete_message_batch(
    batches: MessageBatches, owner: OwnerOfFiles, batch_id: BatchId
) -> Response:
    """Delete a message batch that has ended, with its files."""
    await batches.delete(owner, batch_id)
    return _json({"id": batch_id, "type": "message_batch_deleted"})


@_routes.get("/{batch_id}/results", summary="Get the results of a message batch", **_RESULTS)
async def get_message_batch_results(
    batches: MessageBatches, owner: OwnerOfFiles, batch_id: BatchId
) -> Response:
    """Get the results of a message batch that has ended: a JSON object in each line."""
    return Stream(await batches.results(owner, batch_id), media_type=MEDIA_TYPE)


customers = APIRouter(dependencies=[Depends(caller_principal)])
customers.include_router(_routes)
customers.include_router(_routes, prefix=ANTHROPIC_PREFIX, include_in_schema=False)
