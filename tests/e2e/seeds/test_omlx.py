"""The documents of oMLX, replayed: their examples of completions and chats."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from contract.dialect import Dialect
from tests.e2e.at_once import at_once
from tests.e2e.examples import OPEN, ids_of
from tests.e2e.seeds.calling import (
    CHATS,
    FOLDER,
    Body,
    Caller,
    check_like,
    check_usage,
    documented_answer,
    example_bytes,
    text_of,
)
from tests.support.stack import MODEL, Stack

pytestmark = pytest.mark.e2e

DIALECT = "omlx"
CURL = (FOLDER / "bodies" / "omlx_chat_curl.sh").read_text()
REQUEST: Body = json.loads(CURL.partition("-d '")[2].rstrip().removesuffix("'"))


def test_example_gets_the_answer_example(caller: Caller) -> None:
    answer = caller.complete(DIALECT, example_bytes("omlx_request"))

    check_like(documented_answer("omlx_response"), answer)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "your-model"
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    assert answer["usage"]["prompt_tokens"] == len(ids_of("The quick brown fox"))
    assert answer["usage"]["completion_tokens"] <= 50


def test_models_are_listed(caller: Caller) -> None:
    listed = caller.get("/v1/models").json()

    [model] = listed["data"]
    assert model["id"] == MODEL
    assert "your-model" in model["aliases"]
    assert caller.get("/v1/models/your-model").json() == model


def test_xtc_excludes_top_choices(caller: Caller) -> None:
    body = {"prompt": OPEN, "max_tokens": 30, "logprobs": 1, "seed": 3, "temperature": 1}
    xtc = {"xtc_probability": 1.0, "xtc_threshold": 0.05}

    def tops(answer: Body) -> float:
        logprobs = answer["choices"][0]["logprobs"]
        chosen = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        hits = [float(value) >= max(top.values()) for value, top in chosen]
        return float(sum(hits)) / len(hits)

    without, on, off = at_once(
        lambda: caller.complete(DIALECT, body),
        lambda: caller.complete(DIALECT, body | xtc),
        lambda: caller.complete(DIALECT, body | xtc | {"xtc_probability": 0.0}),
    )
    assert tops(on) < tops(without)
    assert text_of(off) == text_of(without)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_chat_example_for_curl_gets_the_answer_example(stack: Stack, tmp_path: Path) -> None:
    key = stack.key("documents", allowed_models=(MODEL,), dialect=Dialect.OMLX)
    # The command runs unchanged: curl reads the server's address and the key from a file.
    address = stack.url.removeprefix("http://")
    lines = [
        f'connect-to = "localhost:8000:{address}"',
        f'header = "Authorization: Bearer {key}"',
        'noproxy = "*"',
        "silent",
    ]
    (tmp_path / ".curlrc").write_text("\n".join(lines))
    process = subprocess.run(
        ["bash", "-c", CURL],
        env={"CURL_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        timeout=120,
        check=True,
    )

    check_chat_answer(json.loads(process.stdout))


def test_chat_example_gets_the_answer_example(caller: Caller) -> None:
    check_chat_answer(caller.complete(DIALECT, REQUEST, CHATS))


def check_chat_answer(answer: Body) -> None:
    documented = documented_answer("omlx_chat_response")
    check_like(documented, answer)
    [choice] = answer["choices"]
    message = choice["message"]
    assert message.keys() >= documented["choices"][0]["message"].keys()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "your-model"
    assert message["reasoning_content"] is None
    assert message["tool_calls"] is None
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 20
    check_usage(answer["usage"])


def test_argument_unused_by_the_template_is_reported(caller: Caller) -> None:
    arguments = {"chat_template_kwargs": {"reasoning_effort": "low"}, "max_tokens": 4}
    response = caller.post(DIALECT, REQUEST | arguments, CHATS)

    assert response.status_code == 200
    ignored = response.headers["x-ignored-params"]
    assert ignored == "chat_template_kwargs.reasoning_effort"
