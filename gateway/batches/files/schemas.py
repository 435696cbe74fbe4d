"""Response bodies of files, in the form of OpenAI's API."""

from collections.abc import Callable
from datetime import datetime
from typing import Generic, Literal, Self, TypeVar

from pydantic import BaseModel, Field

from gateway.platform.database.paging import Page
from gateway.records.batches import Batch, File, FilePurpose

T = TypeVar("T", bound=BaseModel)
R = TypeVar("R", File, Batch)


class FileBody(BaseModel):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int = Field(description="Bytes so far: a result file grows while its batch runs.")
    created_at: int = Field(description="Unix time in seconds.")
    expires_at: int | None = Field(description="Unix time in seconds; null: not known yet.")
    filename: str
    purpose: FilePurpose
    status: Literal["processed"] = "processed"
    lines: int

    @classmethod
    def of(cls, file: File) -> Self:
        """Return the response body of a file."""
        return cls(
            id=file.id,
            bytes=file.size,
            created_at=to_seconds(file.created_at),
            expires_at=None if file.expires_at is None else to_seconds(file.expires_at),
            filename=file.name,
            purpose=file.purpose,
            lines=file.lines,
        )


class CursorList(BaseModel, Generic[T]):
    """A page of a list."""

    object: Literal["list"] = "list"
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


class FileList(CursorList[FileBody]):
    """A page of files."""


class DeletedFile(BaseModel):
    """A deleted file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def to_seconds(time: datetime) -> int:
    """Return Unix seconds, as OpenAI's API shows times."""
    return int(time.timestamp())
