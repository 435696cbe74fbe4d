"""`/v1/files`: uploads, lists, downloads, refusals, and who sees what."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, NotFoundError, OpenAI

from tests.batches.conftest import MAX_BODY_BYTES, MOST_LINES, execute, jsonl, line, upload
from tests.gateway.conftest import eventually, gateway_client
from tests.support.stack import Stack

CONTENT = jsonl(line("a"), line("b"), line("c"))
BOUNDARY = "a-boundary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def stored(stack: Stack) -> set[str]:
    """Return the objects in the file store, and the ids in the table of files."""
    folder = Path(stack.environment["SLUICE_FILE_STORE"])
    return {
        *(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
        *(row[0] for row in execute(stack, "SELECT id FROM files")),
    }


def test_files_are_uploaded_listed_read_and_deleted(stack: Stack, openai: OpenAI) -> None:
    before = stored(stack)
    files = [
        openai.files.create(
            file=(f"{name}.jsonl", CONTENT),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7200},
        )
        for name in "xyz"
    ]
    newest = [file.id for file in reversed(files)]
    first = files[0]
    assert (first.bytes, first.filename, first.purpose) == (len(CONTENT), "x.jsonl", "batch")
    assert first.expires_at == first.created_at + 7200
    assert openai.files.retrieve(first.id) == first

    page = openai.files.list(limit=2)
    assert [file.id for file in page.data] == newest[:2]
    assert page.has_more
    # The client requests the pages one after the other.
    assert [file.id for file in openai.files.list(limit=2)][:3] == newest
    assert [file.id for file in openai.files.list(order="asc", after=first.id)][:2] == [
        files[1].id,
        files[2].id,
    ]
    outputs = openai.files.list(purpose="batch_output").data
    assert not {file.id for file in outputs} & {*newest}

    assert openai.files.content(first.id).content == CONTENT
    for wanted, status, content in (
        ("bytes=5-9", 206, CONTENT[5:10]),
        ("bytes=5-", 206, CONTENT[5:]),
        ("bytes=-7", 206, CONTENT[-7:]),
        ("bytes=0-99999", 200, CONTENT),
        ("bytes=9-5", 200, CONTENT),
        ("lines=1-2", 200, CONTENT),
    ):
        part = openai.files.content(first.id, extra_headers={"range": wanted}).response
        assert (part.status_code, part.content) == (status, content), wanted
    with pytest.raises(APIStatusError) as raised:
        openai.files.content(first.id, extra_headers={"range": f"bytes={len(CONTENT)}-"})
    assert raised.value.status_code == 416
    assert raised.value.response.headers["content-range"] == f"bytes */{len(CONTENT)}"

    for file in files:
        assert openai.files.delete(file.id).deleted
    with pytest.raises(NotFoundError):
        openai.files.retrieve(first.id)
    assert stored(stack) == before


def form(content: bytes, name: str = 'file"; filename="input.jsonl', **fields: str) -> bytes:
    """Return a form with a file and other fields."""
    parts = {"purpose": "batch"} | fields
    values = [(key, value.encode()) for key, value in parts.items() if value] + [(name, content)]
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="'
    return (
        b"".join(f'{head}{key}"\r\n\r\n'.encode() + value + b"\r\n" for key, value in values)
        + f"--{BOUNDARY}--\r\n".encode()
    )


GOOD = json.dumps(line("a")).encode()
BAD: dict[str, tuple[bytes, int, str]] = {
    "byte order mark": (form(b"\xef\xbb\xbf" + CONTENT), 400, "Line 1 of the file begins with a"),
    "encoding": (form(GOOD + b"\n" + b'{"a":"\xe9"}\n'), 400, "Line 2 of the file is not valid"),
    "truncated character": (form(GOOD + b"\n\xc3"), 400, "Line 2 of the file is not valid UTF-8"),
    "long line": (
        form(GOOD + b"\n" + b"x" * (MAX_BODY_BYTES + 1)),
        400,
        f"Line 2 of the file has more than {MAX_BODY_BYTES} bytes",
    ),
    "many lines": (form(b"{}\n" * (MOST_LINES + 1)), 400, f"at most {MOST_LINES} lines"),
    "empty": (form(b""), 400, "The file is empty."),
    "no file": (form(b"x", name="purpose"), 400, "Missing required parameter: 'file'."),
    "no file name": (form(CONTENT, name="file"), 400, "'file' must be a file."),
    "no purpose": (form(CONTENT, purpose=""), 400, "Missing required parameter: 'purpose'."),
    "purpose": (form(CONTENT, purpose="vision"), 400, "'purpose' must be batch."),
    "unknown field": (form(CONTENT, color="red"), 400, 'unknown field "color"'),
    "expiry": (
        form(CONTENT, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}),
        400,
        "from 3600 to 2592000 seconds. Given: 60.",
    ),
    "anchor": (form(CONTENT, **{"expires_after[seconds]": "7200"}), 400, "must be created_at"),
    "half a form": (form(CONTENT)[:-20], 400, "The form is incomplete."),
    "no form": (b"--" + CONTENT, 400, "The form is malformed"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_upload_is_refused_and_leaves_nothing(
    stack: Stack, client: httpx.AsyncClient, name: str
) -> None:
    before = stored(stack)
    body, status, message = BAD[name]
    async with client:
        response = await client.post("/v1/files", content=body, headers=FORM)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert stored(stack) == before


async def test_upload_that_is_no_form_is_refused(client: httpx.AsyncClient) -> None:
    async with client:
        response = await client.post("/v1/files", json={})
    assert response.status_code == 415


async def test_upload_that_breaks_off_leaves_nothing(stack: Stack) -> None:
    before = stored(stack)
    url = httpx.URL(stack.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    body = form(CONTENT)
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stack.key()}\r\n"
    length = f"content-length: {len(body)}\r\ncontent-type: {FORM['content-type']}\r\n\r\n"
    writer.write(f"{head}{length}".encode() + body[:-30])
    await writer.drain()
    await eventually(lambda: stored(stack) != before, what="the upload having begun")
    writer.close()
    await eventually(lambda: stored(stack) == before, what="the upload being removed")


@pytest.fixture(scope="package")
def stranger_key(stack: Stack) -> str:
    """A key of another tenant."""
    return stack.key("stranger")


async def test_only_the_owner_sees_files_and_batches(
    stack: Stack, openai: OpenAI, stranger_key: str
) -> None:
    file_id = upload(openai, line("a"))
    batch = openai.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
    )
    async with gateway_client(stack.url, stranger_key) as stranger:
        for method, path in (
            ("GET", f"/v1/files/{file_id}"),
            ("GET", f"/v1/files/{file_id}/content"),
            ("DELETE", f"/v1/files/{file_id}"),
            ("GET", f"/v1/batches/{batch.id}"),
            ("POST", f"/v1/batches/{batch.id}/cancel"),
        ):
            response = await stranger.request(method, path)
            assert response.status_code == 404, path
        body: dict[str, Any] = {
            "input_file_id": file_id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        assert (await stranger.post("/v1/batches", json=body)).status_code == 404
        for path in ("/v1/files", "/v1/batches"):
            assert (await stranger.get(path)).json()["data"] == []
            assert (await stranger.get(path, params={"after": file_id})).status_code == 400
