"""`/v1/files`: uploads, lists, downloads, refusals, and who sees what."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi.routing import APIRoute
from openai import APIStatusError, NotFoundError, OpenAI

from gateway.batches.files.routes import router as files_router
from gateway.batches.messages import customers as messages_router
from gateway.batches.routes import router as batches_router
from gateway.http.form import FileForm
from tests.gateway.batches.conftest import (
    MAX_BODY_BYTES,
    MOST_LINES,
    create,
    execute,
    jsonl,
    line,
    run_sluice,
    wait_for,
)
from tests.gateway.conftest import eventually, gateway_client
from tests.support.stack import MODEL, Stack

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

    whole = openai.files.content(first.id).response
    assert whole.content == CONTENT
    disposition = whole.headers["content-disposition"]
    assert disposition == f"attachment; filename*=UTF-8''{quote(first.filename, safe='')}"
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
    "no file": (
        form(b"x", name="expires_after[anchor]"),
        400,
        "Missing required parameter: 'file'.",
    ),
    "no file name": (form(CONTENT, name="file"), 400, "'file' must be a file."),
    "no purpose": (form(CONTENT, purpose=""), 400, "Missing required parameter: 'purpose'."),
    "purpose": (form(CONTENT, purpose="vision"), 400, "'purpose' must be batch."),
    "long purpose": (
        form(CONTENT, purpose="p" * 1025),
        400,
        "'purpose' must have at most 1024 bytes. Given: \"ppp",
    ),
    "many fields": (
        form(CONTENT, **{f"f{number}": "x" for number in range(32)}),
        400,
        "at most 32 fields",
    ),
    "expiry": (
        form(CONTENT, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}),
        400,
        "from 3600 to 2592000 seconds. Given: 60.",
    ),
    "other form of the expiry": (
        form(CONTENT, expires_after='{"anchor": "created_at", "seconds": 7200}'),
        400,
        "Use 'expires_after[anchor]' and",
    ),
    "anchor": (form(CONTENT, **{"expires_after[seconds]": "7200"}), 400, "must be created_at"),
    "header without a colon": (
        form(CONTENT).replace(b'filename="', b'filename="a\r\nb'),
        400,
        "The form is malformed",
    ),
    "half a form": (form(CONTENT)[:-20], 400, "The form is incomplete."),
    "no form": (b"--" + CONTENT, 400, "The form is malformed"),
    "field twice": (form(b"batch", name="purpose"), 400, "has more than one 'purpose'."),
    "file twice": (
        form(CONTENT)[:-4] + form(CONTENT, purpose="").removeprefix(f"--{BOUNDARY}".encode()),
        400,
        "more than one 'file'.",
    ),
    "boundary in a line": (
        form(CONTENT + f"\r\n--{BOUNDARY}x".encode()),
        400,
        "a boundary does not end its line",
    ),
    "headers": (
        f"--{BOUNDARY}\r\n".encode() + b"a: b\r\n" * 10_000,
        400,
        "the headers of a part have more than 4096 bytes",
    ),
    "much besides the file": (b"\r\n" * 40_000, 413, "at most 65536 bytes besides the file"),
    "encoding of the file name": (
        form(CONTENT).replace(b"input", b"\xff"),
        400,
        "'file' must be UTF-8",
    ),
    "control character in the file name": (
        form(CONTENT).replace(b"input", b"\x1b"),
        400,
        'printable characters. Given: "\\u001b',
    ),
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


async def test_field_without_effect_is_named(client: httpx.AsyncClient) -> None:
    async with client:
        body = form(CONTENT, color="red", **{"a b": "x"})
        response = await client.post("/v1/files", content=body, headers=FORM)
        assert response.status_code == 200, response.text
        assert response.headers["x-ignored-params"] == "color"
        await client.delete(f"/v1/files/{response.json()['id']}")


async def test_upload_that_is_no_form_is_refused(client: httpx.AsyncClient) -> None:
    async with client:
        response = await client.post("/v1/files", json={})
        long = {"content-type": f"multipart/form-data; boundary={'b' * 257}"}
        refused = await client.post("/v1/files", content=b"", headers=long)
    assert response.status_code == 415
    assert refused.status_code == 400
    assert "must have at most 256 bytes. Given: 257." in refused.json()["error"]["message"]


@pytest.mark.parametrize("boundary", [b"b", b"-" * 70], ids=["short", "dashes"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_form_is_parsed_however_it_is_cut_into_pieces(boundary: bytes, size: int) -> None:
    content = b"\r\n--\r\n-" + b"\r\n--" + boundary[:-1] + b"\r\n\r"
    whole = form(content).replace(BOUNDARY.encode(), boundary) + b"epilogue"
    parsed = FileForm(boundary, known={"purpose"})
    pieces = [parsed.feed(whole[at : at + size]) for at in range(0, len(whole), size)]
    assert (b"".join(pieces), parsed.is_complete) == (content, True)
    assert (parsed.fields, parsed.name) == ({"purpose": "batch"}, "input.jsonl")


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


@pytest.fixture(params=["another tenant", "a project of the tenant"])
def stranger(stack: Stack, request: pytest.FixtureRequest) -> httpx.AsyncClient:
    """A client whose credential may not use the files and batches of the tenant's other keys."""
    if request.param == "another tenant":
        return gateway_client(stack.url, stack.key("stranger"))
    project = run_sluice(stack, "projects", "create", "--tenant", "acme", "p")
    return gateway_client(
        stack.url, stack.key("acme", project_id=re.findall(r"prj_\w+", project)[0])
    )


def paths(*, has_id: bool) -> list[tuple[str, str]]:
    """Return methods and paths of all routes, with or without the id of a file or batch."""
    return [
        (method, route.path)
        for router in (files_router.customers, batches_router.customers, messages_router)
        for route in router.routes
        if isinstance(route, APIRoute) and ("{" in route.path) is has_id
        for method in sorted(route.methods)
    ]


def message_of(response: httpx.Response) -> str:
    """Return the message of an error, without the id in it."""
    return re.sub(r'"[^"]*"', "", str(response.json()["error"]["message"]))


def message_batch(stack: Stack) -> str:
    """Create a message batch, and return its id."""
    params = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    response = httpx.post(
        f"{stack.url}/v1/messages/batches",
        headers={"x-api-key": stack.key()},
        json={"requests": [{"custom_id": "a", "params": params}]},
    )
    return str(response.json()["id"])


async def test_only_the_owner_sees_files_and_batches(
    stack: Stack, openai: OpenAI, stranger: httpx.AsyncClient
) -> None:
    ended = wait_for(openai, create(openai, line("a"), line("b", temperature=-1)).id)
    ids = {
        "file_id": (ended.input_file_id, ended.output_file_id, ended.error_file_id),
        "batch_id": (ended.id, message_batch(stack)),
    }
    body: dict[str, Any] = {
        "input_file_id": ended.input_file_id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    tried = 0
    async with stranger:
        for method, path in paths(has_id=True):
            for name, id_ in ((name, id_) for name, some in ids.items() for id_ in some):
                if f"{{{name}}}" in path:
                    response = await stranger.request(method, path.format(**{name: id_}))
                    missing = await stranger.request(method, path.format(**{name: "missing"}))
                    assert response.status_code == 404, (method, path)
                    assert message_of(response) == message_of(missing)
                    tried += 1
        for method, path in paths(has_id=False):
            if method == "GET":
                assert (await stranger.get(path)).json()["data"] == []
                # A foreign id is no entry of this list, like one that does not exist.
                cursor = "after_id" if "messages" in path else "after"
                answers = [
                    await stranger.get(path, params={cursor: after})
                    for after in (ended.id, ended.input_file_id, "missing")
                ]
                assert {each.status_code for each in answers} == {400}
                assert 'Given: "missing".' in answers[-1].json()["error"]["message"]
                assert len(set(map(message_of, answers))) == 1
        refused = await stranger.post("/v1/batches", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "input_file_id")
        assert f"\"{ended.input_file_id}\" in 'input_file_id'" in refused.text.replace("\\", "")
    # The routes of message batches have two prefixes.
    assert tried == len(ids["file_id"]) * 3 + len(ids["batch_id"]) * (2 + 4 * 2)
    # Nothing of it was deleted.
    assert openai.files.content(ended.output_file_id or "").content
    assert len(openai.files.content(ended.input_file_id).content.splitlines()) == 2
