"""Content of a file as a response, whole or one range of it."""

import re
from typing import Final
from urllib.parse import quote

from fastapi import Response

from gateway.batches.files.reader import FileReader
from gateway.http.connection import Stream
from gateway.records.batches import File
from gateway.records.errors import RangeNotSatisfiableError

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
