"""Requests sent byte for byte in a dialect, and readers of the responses."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from contract.dialect import Dialect
from gateway.dialects.profile import PROFILES
from tests.e2e.at_once import Check, at_once, each_at_once
from tests.support.stack import MODEL

FOLDER = Path(__file__).parent
CHATS = "/v1/chat/completions"
DONE = "[DONE]"
TIMEOUT_SECONDS = 120.0

Body = dict[str, Any]

DIALECTS = tuple(dialect.value for dialect in Dialect)
LLAMACPP = ("llamacpp", "llamacpp-2026")


def each_dialect(*fields: str) -> Callable[[Check], Check]:
    """Run a test in each dialect, concurrently; most only in long runs.

    Of dialects whose profiles have the same values in `fields`, the default run takes the first:
    they differ in nothing else that this test concerns. tests/gateway/dialects tests the parser of
    each.
    """
    seen: list[tuple[Any, ...]] = []
    parameters = []
    for dialect in DIALECTS:
        values = tuple(getattr(PROFILES[Dialect(dialect)], field) for field in fields)
        parameters.append(pytest.param(dialect, marks=[pytest.mark.long] * (values in seen)))
        seen.append(values)
    return each_at_once("dialect", parameters)


def example_bytes(name: str) -> bytes:
    """Return a request body exactly as an API's document has it."""
    return (FOLDER / "bodies" / f"{name}.json").read_bytes()


def example(name: str) -> Body:
    """Return a request body of an API's document, to be changed."""
    body: Body = json.loads(example_bytes(name))
    return body


def documented_answer(name: str) -> Body:
    """Return a response of an API's document."""
    body: Body = json.loads((FOLDER / "answers" / f"{name}.json").read_bytes())
    return body


class Caller:
    """One key at one gateway."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=TIMEOUT_SECONDS
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def post(
        self,
        dialect: str | None,
        body: Body | bytes,
        path: str = "/v1/completions",
        **headers: str,
    ) -> httpx.Response:
        """Send a body, unchanged if it is bytes; a body without a model gets the tiny one."""
        content = body if isinstance(body, bytes) else json.dumps({"model": MODEL, **body}).encode()
        named = {"x-api-dialect": dialect} if dialect else {}
        return self._http.post(
            path, content=content, headers={"content-type": "application/json", **named, **headers}
        )

    def get(self, path: str, dialect: str | None = None) -> httpx.Response:
        """Send a GET."""
        return self._http.get(path, headers={"x-api-dialect": dialect} if dialect else {})

    def complete(
        self, dialect: str | None, body: Body | bytes, path: str = "/v1/completions"
    ) -> Body:
        """Return a whole response, which must be a success."""
        response = self.post(dialect, body, path)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        answer: Body = response.json()
        check_usage(answer["usage"])
        return answer

    def texts(self, dialect: str | None, *bodies: Body) -> list[str]:
        """Return the text of the response to each body, of one choice each; sent concurrently."""
        return [
            text_of(answer)
            for answer in at_once(*(partial(self.complete, dialect, body) for body in bodies))
        ]

    def stream(
        self, dialect: str | None, body: Body | bytes, path: str = "/v1/completions"
    ) -> list[Body]:
        """Return the chunks of a streamed response, which must be a success ended by `[DONE]`."""
        streamed = {**body, "stream": True} if isinstance(body, dict) else body
        response = self.post(dialect, streamed, path)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "\nid:" not in response.text
        return chunks_of(response.text)

    def native_stream(self, body: Body, path: str = "/completion") -> list[Body]:
        """Return the results of a stream in llama.cpp's own form, which must be a success."""
        response = self.post("llamacpp", {**body, "stream": True}, path)
        assert response.status_code == 200, response.text
        lines = response.text.split("\n")
        results = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        assert all("error" not in result for result in results), response.text
        return results

    def refused(
        self, dialect: str | None, body: Body | bytes, path: str = "/v1/completions"
    ) -> Body:
        """Return the error of a request that must be rejected as invalid."""
        response = self.post(dialect, body, path)
        expected = 422 if dialect == "mistralrs" else 400
        assert response.status_code == expected, (dialect, response.status_code, response.text)
        assert response.headers["x-should-retry"] == "false"
        error: Body = response.json()["error"]
        return error


def chunks_of(text: str) -> list[Body]:
    """Return the JSON of each event; the last must be `[DONE]`. Only ids may come with them."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    lines = [block.partition("\nid: ")[0] for block in blocks]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines), text
    events = [line.removeprefix("data: ") for line in lines]
    assert events[-1] == DONE, events[-1]
    chunks: list[Body] = [json.loads(event) for event in events[:-1]]
    assert all("error" not in chunk for chunk in chunks), text
    return chunks


def check_usage(usage: Body) -> None:
    """Check that the counts are present and add up."""
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] >= 0
    assert usage["completion_tokens"] >= 0


def text_of(answer: Body) -> str:
    """Return the text of a response with one choice."""
    [choice] = answer["choices"]
    text: str = choice["text"]
    return text


def texts_of(answer: Body) -> list[str]:
    """Return the texts of all choices, which must be in the order of their index."""
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def texts_by_seed(
    caller: Caller, dialect: str | None, body: Body, seeds: Iterable[int] = (21, 22, 23)
) -> list[str]:
    """Return the sampled text for each seed."""
    return caller.texts(dialect, *(body | {"seed": seed} for seed in seeds))


def check_defaults(
    caller: Caller, dialect: str, body: Body, *, defaults: Body, others: Body
) -> None:
    """Assert that explicit defaults of a dialect change nothing, and that other values do."""
    implicit, explicit, changed = at_once(
        lambda: texts_by_seed(caller, dialect, body),
        lambda: texts_by_seed(caller, dialect, body | defaults),
        lambda: texts_by_seed(caller, dialect, body | others),
    )
    assert explicit == implicit
    assert changed != implicit


def joined(chunks: list[Body], index: int = 0) -> str:
    """Return the text of one streamed choice."""
    return "".join(
        choice["text"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def finishes(chunks: list[Body]) -> list[tuple[int, str]]:
    """Return index and reason of every choice that ended, in order of their ends."""
    return [
        (choice["index"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"] is not None
    ]


def check_like(documented: Any, given: Any, *, at: str = "answer") -> None:
    """Check that every field of a documented response is present, with a value of the same type."""
    if isinstance(documented, dict):
        assert isinstance(given, dict), at
        missing = documented.keys() - given.keys()
        assert not missing, f"{at} has no {missing}"
        for name, value in documented.items():
            check_like(value, given[name], at=f"{at}.{name}")
    elif isinstance(documented, list):
        assert isinstance(given, list), at
        assert given, f"{at} is empty"
        for position, item in enumerate(given):
            check_like(documented[0], item, at=f"{at}[{position}]")
    elif documented is not None and given is not None:
        kinds = (int, float) if isinstance(documented, float) else type(documented)
        assert isinstance(given, kinds), f"{at}: {given!r} is not like {documented!r}"
    else:
        # The document has null: the test itself checks other values.
        assert given is None or documented is None, f"{at}: null instead of {documented!r}"
