"""Batches and files: upload, run, follow, download, cancel and delete.

Operators list those of a tenant, cancel batches and delete files; they read no content.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from gateway.batches.files.routes import FileId, Files, content_response
from gateway.batches.files.service import FileService, Owner
from gateway.batches.files.upload import Uploads
from gateway.batches.lines import ENDPOINTS_BY_PATH, decode_line
from gateway.batches.routes import Batches, BatchId
from gateway.console.formats import number, shortened, size
from gateway.console.forms import CSRF_FIELD, Form
from gateway.console.lists import Newest
from gateway.console.routing import (
    FORM,
    CustomerRoute,
    TenantRoute,
    UploadRoute,
    needs,
    redirect,
    require_token,
)
from gateway.console.tables import Action, Cell, Column, Field, Table, pairs
from gateway.console.visitor import Visitor
from gateway.http.services import made
from gateway.platform.database.paging import PageRequest
from gateway.records.batches import Batch, BatchStatus, File, FilePurpose
from gateway.records.errors import ApiError, InvalidParameterError, NotFoundError
from gateway.records.scopes import Scope
from gateway.records.times import utc_now

MOST_FILES: Final = 100
"""Files that the form of a batch offers."""
FAILED_BYTES: Final = 64 * 1024
"""Bytes of an error file whose lines a page shows."""
FIRST_BYTES: Final = 64 * 1024
"""Bytes of a file in which its first line is read."""
_MOST_LINES: Final = 5
"""Lines that an error of several lines names."""
_RETENTIONS: Final = (("86400", "1 day"), ("604800", "7 days"), ("2592000", "30 days"))
_SECONDS: Final = "expires_after[seconds]"
_UPLOAD: Final = {"purpose": FilePurpose.BATCH.value, "expires_after[anchor]": "created_at"}
_FIELDS: Final = (
    Field("file", "File", "One request in each line, as JSON in UTF-8.", "file", is_required=True),
    Field(_SECONDS, "Delete it after", options=_RETENTIONS, default=_RETENTIONS[-1][0]),
)
_CLASSES: Final = {
    BatchStatus.COMPLETED: "good",
    BatchStatus.FAILED: "bad",
    BatchStatus.EXPIRED: "bad",
    BatchStatus.CANCELLED: "warn",
    BatchStatus.CANCELLING: "warn",
}
_OF_FILE: Final = (("", "the one of the file's first line"),)
_STOPPABLE: Final = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
NOTICES: Final = {
    "first": "Upload the requests of the batch first.",
    "cancelled": "The batch is cancelled. The results of lines that have ended stay.",
    "deleted": "The file is deleted.",
}

router = APIRouter(route_class=TenantRoute, include_in_schema=False)
own = APIRouter(route_class=CustomerRoute, prefix="/console", include_in_schema=False)
"""Pages without a counterpart for operators."""
_uploads = APIRouter(route_class=UploadRoute, include_in_schema=False)

Runs = Annotated[Visitor, Depends(needs(Scope.COMPLETIONS))]


def _owner(visitor: Visitor) -> Owner:
    return Owner(visitor.tenant_id, visitor.principal.project_id)


@router.get("/batches")
async def list_batches(visitor: Runs, batches: Batches, wanted: Newest) -> Response:
    """List batches, newest first."""
    home = f"{visitor.home}/batches"
    return visitor.list_page(
        "Batches",
        (
            Column("Batch", lambda each: Cell(shortened(each.id), f"{home}/{each.id}"), "mono"),
            Column("Status", lambda each: Cell(each.status, kind=_CLASSES.get(each.status, ""))),
            Column("Ended", progress, "num", order=_ended),
            Column("Failed", lambda each: each.failed, "num wide"),
            Column("Cost", lambda each: each.cost_micros, "money"),
            Column("Model", lambda each: ", ".join(each.models), "wide name"),
            Column("Created (UTC)", lambda each: each.created_at, "time wide"),
        ),
        await batches.page(_owner(visitor), wanted),
        "There is no batch.",
        action=Action("Create a batch", "/console/batches/new"),
        text="A batch runs the requests of a file at the price of the tier batch.",
        notices=NOTICES,
    )


@own.api_route("/batches/new", methods=FORM)
async def create_batch(
    visitor: Runs, batches: Batches, files: Files, file: Annotated[str, Query(max_length=63)] = ""
) -> Response:
    """Create a batch; without a file to run, show the form of a file."""
    form = visitor.form
    if form.is_sent:
        input_id = form["input_file_id"]
        batch = await batches.create(
            visitor.principal,
            input_file_id=input_id,
            endpoint=form["endpoint"] or await _endpoint_of(files, _owner(visitor), input_id),
            completion_window=form["completion_window"],
            labels={"description": form["metadata"]} if form["metadata"] else None,
            output_seconds=None,
        )
        return redirect(f"/console/batches/{batch.id}")
    owner, wanted = _owner(visitor), PageRequest(limit=MOST_FILES, is_newest_first=True)
    if not form and file:
        form = Form.of({"input_file_id": file})
    found = await files.page(owner, wanted, purpose=FilePurpose.BATCH)
    chosen = await _find(files, owner, form["input_file_id"])
    inputs = {each.id: _described(each) for each in (*found.entries, *filter(None, [chosen]))}
    if not inputs:
        return redirect("/console/files/new", done="first")
    return visitor.form_page(
        "Create a batch",
        (
            Field("input_file_id", "File", options=list(inputs.items())),
            Field("endpoint", "Endpoint", options=[*_OF_FILE, *pairs(ENDPOINTS_BY_PATH)]),
            Field("completion_window", "End within", options=pairs(batches.windows)),
            Field("metadata", "Description", "Optional, in the batch's metadata."),
        ),
        "Create the batch",
        values=form,
        text="All lines are requests to the endpoint. Nothing runs if one of them is invalid.",
    )


def _described(file: File) -> str:
    return f"{file.name}, {number(file.lines)} lines, {shortened(file.id)}"


@router.get("/batches/{batch_id}")
async def show_batch(visitor: Runs, batches: Batches, files: Files, batch_id: BatchId) -> Response:
    """Show a batch with its progress, its errors and its results so far."""
    owner = _owner(visitor)
    batch = await batches.get(owner, batch_id)
    output, errors = [
        await _find(files, owner, each) for each in (batch.output_file_id, batch.error_file_id)
    ]
    failed = []
    if errors is not None and not visitor.is_operator:
        failed = list(_failures(await files.reader.read(errors.id, 0, FAILED_BYTES)))
    end = batch.projected_end(utc_now())
    return visitor.page(
        "batch.html",
        batch=batch,
        status_class=_CLASSES.get(batch.status, ""),
        ended=_ended(batch),
        is_stoppable=batch.status in _STOPPABLE,
        projected=end and min(end, batch.expires_at),
        input=await _find(files, owner, batch.input_file_id),
        output=output,
        errors=errors,
        invalid=Table("Errors of the file", _INVALID, _alike(batch.errors or ()), ""),
        failed=Table("Failed lines", _FAILED, failed, ""),
        notices=NOTICES,
    )


_INVALID: Final = (
    Column("Lines", lambda each: _lines(each[1])),
    Column("Code", lambda each: each[0][0], "mono"),
    Column("Parameter", lambda each: each[0][1], "mono wide"),
    Column("Error", lambda each: each[0][2], "below"),
)
_FAILED: Final = (
    Column("custom_id", lambda each: each[0], "name"),
    Column("Code", lambda each: each[1], "mono"),
    Column("Error", lambda each: each[2], "below"),
)


def _alike(errors: Iterable[Mapping[str, Any]]) -> list[tuple[tuple[Any, ...], list[int]]]:
    """Return equal errors of lines once, with the lines."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for each in errors:
        found.setdefault((each["code"], each["param"], each["message"]), []).append(each["line"])
    return list(found.items())


def _lines(numbers: Sequence[int | None]) -> str:
    known = [f"{each:,}" for each in numbers if each is not None]
    more = len(known) - _MOST_LINES
    return ", ".join(known[:_MOST_LINES]) + (f" and {more:,} more" if more > 0 else "")


def _failures(content: bytes) -> Iterator[tuple[str, str, str]]:
    """Yield the custom ids, codes and messages of the whole lines of an error file."""
    for line in content.split(b"\n")[:-1]:
        found = msgspec.json.decode(line)
        error = found["error"] or found["response"]["body"].get("error") or {}
        code = error.get("code") or error.get("type")
        yield found["custom_id"], str(code), str(error.get("message"))


@router.api_route("/batches/{batch_id}/cancel", methods=FORM)
async def cancel(visitor: Runs, batches: Batches, batch_id: BatchId) -> Response:
    """Ask for confirmation, then cancel a batch."""
    batch = await batches.get(_owner(visitor), batch_id)
    if visitor.form.is_sent:
        await batches.cancel(_owner(visitor), batch.id)
        return redirect(f"{visitor.home}/batches/{batch.id}", done="cancelled")
    return visitor.confirmation(
        "Cancel the batch",
        title=f"Cancel the batch {shortened(batch.id)}?",
        text=f"{number(_ended(batch))} of {number(batch.total)} lines have ended; their results "
        "stay. The others are not charged. This cannot be undone.",
    )


@router.get("/files")
async def list_files(visitor: Runs, files: Files, wanted: Newest) -> Response:
    """List files, newest first."""
    home = f"{visitor.home}/files"

    def content(file: File) -> str:
        return "" if visitor.is_operator else f"{home}/{file.id}/content"

    def run(file: File) -> Cell:
        is_input = file.purpose is FilePurpose.BATCH and not visitor.is_operator
        href = f"/console/batches/new?file={file.id}" if is_input else ""
        return Cell("run" if is_input else "", href, label=f"run: {file.name}")

    def delete(file: File) -> Cell:
        return Cell("delete", f"{home}/{file.id}/delete", label=f"delete: {file.name}")

    return visitor.list_page(
        "Files",
        (
            Column("Name", lambda each: Cell(each.name, content(each)), "name"),
            Column("Lines", lambda each: each.lines, "num"),
            Column("Size", lambda each: size(each.size), "num", order=lambda each: each.size),
            Column("Purpose", lambda each: each.purpose.value, "wide"),
            Column("Id", lambda each: shortened(each.id), "mono wide"),
            Column("Created (UTC)", lambda each: each.created_at, "time wide"),
            Column("Expires (UTC)", lambda each: each.expires_at, "time wide"),
            Column("", run),
            Column("", delete),
        ),
        await files.page(_owner(visitor), wanted),
        "There is no file.",
        action=Action("Upload a file", "/console/files/new"),
        text="Requests of batches, and the results of batches.",
        notices=NOTICES,
    )


@own.get("/files/new")
async def show_upload(visitor: Runs, done: str = "") -> Response:
    """Show the form of an upload."""
    return _upload_form(visitor, text=NOTICES.get(done, ""))


@_uploads.post("/files/new")
async def upload(
    request: Request, uploads: Annotated[Uploads, made(Uploads)], visitor: Runs
) -> Response:
    """Upload a file, then show the form that runs it."""

    def admit(fields: Mapping[str, str]) -> None:
        require_token(visitor.session, fields.get(CSRF_FIELD, ""))

    try:
        file, _ = await uploads.receive(request, _owner(visitor), is_strict=False, admit=admit)
    except ApiError as error:
        return _upload_form(visitor, error=error)
    return redirect("/console/batches/new", file=file.id)


@own.get("/files/{file_id}/content")
async def get_content(request: Request, files: Files, visitor: Runs, file_id: FileId) -> Response:
    """Download a file; a result file has the lines that have ended."""
    file = await files.get(_owner(visitor), file_id)
    return content_response(files.reader, file, request.headers.get("range"))


@router.api_route("/files/{file_id}/delete", methods=FORM)
async def delete_file(visitor: Runs, files: Files, file_id: FileId) -> Response:
    """Ask for confirmation, then delete a file."""
    file, home = await files.get(_owner(visitor), file_id), f"{visitor.home}/files"
    if visitor.form.is_sent:
        await files.delete(_owner(visitor), file_id)
        return redirect(home, done="deleted")
    return visitor.confirmation(
        "Delete the file",
        of=file.name,
        facts={"Lines": number(file.lines), "Size": size(file.size)},
        text="This cannot be undone.",
        back=home,
    )


def progress(batch: Batch) -> str:
    """Return how many lines have ended; without lines, why."""
    if not batch.total:
        return "file invalid" if batch.status is BatchStatus.FAILED else "not checked yet"
    return f"{number(_ended(batch))} of {number(batch.total)}"


def _ended(batch: Batch) -> int:
    return batch.completed + batch.failed


async def _find(files: FileService, owner: Owner, file_id: str | None) -> File | None:
    """Return a file of a batch, unless it has expired or is deleted."""
    try:
        return None if file_id is None else await files.get(owner, file_id)
    except NotFoundError:
        return None


async def _endpoint_of(files: FileService, owner: Owner, file_id: str) -> str:
    """Return the `url` of the first line of a file. Raises InvalidParameterError without one."""
    file = await _find(files, owner, file_id)
    content = b"" if file is None else await files.reader.read(file.id, 0, FIRST_BYTES)
    try:
        return str(decode_line(content.partition(b"\n")[0]).url)
    except msgspec.DecodeError:
        raise InvalidParameterError(
            "The first line of the file is not a request with a 'url': choose the endpoint.",
            param="endpoint",
        ) from None


def _upload_form(visitor: Visitor, *, text: str = "", error: ApiError | None = None) -> Response:
    return visitor.form_page(
        "Upload a file", _FIELDS, "Upload", text=text, hidden=_UPLOAD, error=error
    )


own.include_router(_uploads)
