"""Files, as OpenAI's API has them: `/v1/files`.

Operators list and delete those of a tenant at `/admin/tenants/{tenant_id}/files`.
"""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar
from urllib.parse import quote

from fastapi import Depends, Path, Query, Request, Response
from pydantic import BaseModel, BeforeValidator, Field

from gateway.accounts.routes_common import (
    PLAIN,
    Caller,
    OfTenant,
    PageBody,
    RecordBody,
    TenantRouter,
)
from gateway.batches.files.service import (
    MAX_RETENTION_SECONDS,
    MIN_RETENTION_SECONDS,
    FileReader,
    FileService,
    Owner,
)
from gateway.batches.files.upload import Uploads
from gateway.dialects.json_types import reference, schema_of
from gateway.dialects.parameters import ignored_header
from gateway.http.allowances import UnpaidRequests
from gateway.http.authorization import Authorizer
from gateway.http.connection import Stream
from gateway.http.exchange import exchange_of
from gateway.http.services import made, services_of
from gateway.platform.database.paging import Page, PageRequest
from gateway.records.batches import Batch, File, FilePurpose
from gateway.records.errors import RangeNotSatisfiableError
from gateway.records.principal import Principal
from gateway.records.scopes import Scope

T = TypeVar("T", bound=BaseModel)
R = TypeVar("R", File, Batch)


def to_seconds(time: datetime | None) -> int | None:
    """Return Unix seconds, as OpenAI's API shows times."""
    return None if time is None else int(time.timestamp())


Seconds = Annotated[int, BeforeValidator(to_seconds)]
SecondsOrNull = Annotated[int | None, BeforeValidator(to_seconds)]


class FileBody(RecordBody):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int = Field(
        validation_alias="size",
        description="Bytes so far: a result file grows while its batch runs.",
    )
    created_at: Seconds = Field(description="Unix time in seconds.")
    expires_at: SecondsOrNull = Field(description="Unix time in seconds; null: not known yet.")
    filename: str = Field(validation_alias="name")
    purpose: FilePurpose
    status: Literal["processed"] = "processed"
    lines: int


class CursorList(PageBody, Generic[T]):
    """A page of a list."""

    data: list[T]
    first_id: str | None
    last_id: str | None = Field(description="`after` of the request for the next page.")
    has_more: bool

    @classmethod
    def of(cls, page: Page[R], body_of: Callable[[R], T]) -> Self:
        """Return the response body of a page of records."""
        ids = [each.id for each in page.entries]
        return cls(
            data=list(map(body_of, page.entries)),
            first_id=ids[0] if ids else None,
            last_id=ids[-1] if ids else None,
            has_more=page.has_more,
        )


class DeletedFile(BaseModel):
    """A deleted file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


MEDIA_TYPE: Final = "application/jsonl"
_RANGE: Final = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


def content_response(reader: FileReader, file: File, wanted: str | None) -> Response:
    """Return the content of a file, or the part that a Range header wants.

    Other units, and several ranges, get the whole file, as HTTP allows. Raises
    RangeNotSatisfiableError.
    """
    start, end = _range(wanted, file.size)
    headers = {
        "accept-ranges": "bytes",
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.name, safe='')}",
        "content-length": str(end - start),
    }
    status = 200
    if (start, end) != (0, file.size):
        status = 206
        headers["content-range"] = f"bytes {start}-{end - 1}/{file.size}"
    pieces = reader.pieces(file.id, start, end)
    return Stream(pieces, status_code=status, headers=headers, media_type=MEDIA_TYPE)


def _range(wanted: str | None, size: int) -> tuple[int, int]:
    """Return the first byte and the one after the last."""
    match = _RANGE.fullmatch(wanted or "")
    if match is None or match[0] == "bytes=-":
        return 0, size
    first, last = match[1], match[2]
    if not first:
        start, end = max(size - int(last), 0), size
    else:
        start, end = int(first), min(int(last or size) + 1, size)
        if last and int(last) < start:
            return 0, size
    if start >= end:
        raise RangeNotSatisfiableError(size)
    return start, end


MAX_LIMIT: Final = 10_000
"""As in OpenAI's API."""
MOST_OF_PAGE: Final = 1_000

_FORM: Final = schema_of(
    '{"file": content, "purpose": "batch", "expires_after[anchor]?": "created_at", '
    '"expires_after[seconds]?": seconds}',
    content={
        "type": "string",
        "format": "binary",
        "description": "Requests, one JSON object per line, in UTF-8.",
    },
    seconds={
        "type": "integer",
        "minimum": MIN_RETENTION_SECONDS,
        "maximum": MAX_RETENTION_SECONDS,
        "description": "After this time the file is deleted.",
    },
)
_UPLOAD: Final = {
    "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
}
_CONTENT: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}, "description": "The file."},
    206: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}, "description": "A range."},
    416: {
        "content": {"application/json": {"schema": reference("Error")}},
        "description": "The range begins after the end of the file.",
    },
}


async def caller_principal(request: Request) -> Principal:
    """Authorize a caller of files and batches. Its requests count as unpaid."""
    services = services_of(request)
    principal = await services[Authorizer].authorize(request, Scope.COMPLETIONS)
    services[UnpaidRequests].admit(exchange_of(request.scope), principal)
    request.state.management_caller = Caller(principal, principal.tenant_id)
    return principal


router = TenantRouter("/files", "Files", caller_principal)


async def owner_of(caller: OfTenant) -> Owner:
    """Return the files and batches that a caller may use."""
    return Owner(caller.tenant_id, None if caller.grant is None else caller.grant.project_id)


Files = Annotated[FileService, made(FileService)]
CallerPrincipal = Annotated[Principal, Depends(caller_principal)]
OwnerOfFiles = Annotated[Owner, Depends(owner_of)]
FileId = Annotated[str, Path(description="Id of the file.")]
After = Annotated[
    str | None, Query(min_length=1, max_length=63, description="`last_id` of the previous page.")
]


@router.of_customers.post("", summary="Upload a file", openapi_extra=_UPLOAD)
async def upload_file(
    request: Request,
    response: Response,
    uploads: Annotated[Uploads, made(Uploads)],
    owner: OwnerOfFiles,
    principal: CallerPrincipal,
) -> FileBody:
    """Upload the requests of a batch: a form with `file` and `purpose`.

    The file is checked while it arrives, and an invalid one is refused with the number of its first
    bad line. All routes under `/v1/files` need the scope `completions`. A project credential sees
    only the files of its project.
    """
    file, ignored = await uploads.receive(request, owner, is_strict=principal.is_strict)
    response.headers.update(ignored_header(ignored))
    return FileBody.of(file)


@router.get("", summary="List files", response_model=CursorList[FileBody])
async def list_files(
    files: Files,
    owner: OwnerOfFiles,
    after: After = None,
    limit: Annotated[
        int,
        Query(
            ge=1,
            le=MAX_LIMIT,
            description=f"Maximum entries of one page, which never has more than {MOST_OF_PAGE}.",
        ),
        PLAIN,
    ] = MAX_LIMIT,
    order: Annotated[
        Literal["asc", "desc"], Query(description="`asc`: oldest first; `desc`: newest first.")
    ] = "desc",
    purpose: Annotated[
        FilePurpose | None, Query(description="Only files with this purpose.")
    ] = None,
) -> Response:
    """List files by their time of creation, newest first by default."""
    wanted = PageRequest(after, min(limit, MOST_OF_PAGE), is_newest_first=order == "desc")
    page = await files.page(owner, wanted, purpose=purpose)
    # FastAPI would check every entry again, and encode it in Python.
    content = CursorList[FileBody].of(page, FileBody.of).model_dump_json()
    return Response(content, media_type="application/json")


@router.of_customers.get("/{file_id}", summary="Get a file")
async def get_file(files: Files, owner: OwnerOfFiles, file_id: FileId) -> FileBody:
    """Get a file, without its content."""
    return FileBody.of(await files.get(owner, file_id))


@router.of_customers.get(
    "/{file_id}/content",
    summary="Get the content of a file",
    responses=_CONTENT,
    response_class=Response,
)
async def get_content(
    request: Request, files: Files, owner: OwnerOfFiles, file_id: FileId
) -> Response:
    """Get the content of a file, or the bytes that the header `Range` names.

    A result file can be read while its batch runs; it contains the lines that have ended.
    """
    file = await files.get(owner, file_id)
    return content_response(files.reader, file, request.headers.get("range"))


@router.delete("/{file_id}", summary="Delete a file")
async def delete_file(files: Files, owner: OwnerOfFiles, file_id: FileId) -> DeletedFile:
    """Delete a file. The input of a batch that has not ended cannot be deleted."""
    await files.delete(owner, file_id)
    return DeletedFile(id=file_id)
