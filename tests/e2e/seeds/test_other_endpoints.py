"""Estimates and tokenisation: they agree with the completions that follow."""

import pytest

from tests.e2e.at_once import each_at_once
from tests.e2e.examples import COUNTING, OPEN, ids_of
from tests.e2e.seeds.calling import LLAMACPP, Body, Caller, each_dialect
from tests.support.stack import MODEL

pytestmark = pytest.mark.e2e

ESTIMATE = "/v1/completions:estimate"
WINDOW = 2048


@each_dialect("max_tokens", "temperature")
@each_at_once(
    "body",
    [
        {"prompt": OPEN},
        {"prompt": [OPEN, COUNTING], "n": 2, "max_tokens": 4},
        {"prompt": [5] * (WINDOW - 3), "max_tokens": 3},
        {"prompt": [5] * WINDOW, "max_tokens": 8, "truncate_sequence": True},
    ],
)
def test_estimate_equals_the_usage_of_the_completion(
    caller: Caller, dialect: str, body: Body
) -> None:
    asked = body | {"ignore_eos": True, "zeta": 1}
    if "max_tokens" not in body and dialect in (*LLAMACPP, "mistralrs", "omlx"):
        asked |= {"max_tokens": 20}
    estimate = caller.post(dialect, asked, ESTIMATE)
    response = caller.post(dialect, asked)

    assert (estimate.status_code, response.status_code) == (200, 200)
    reported, usage = estimate.json(), response.json()["usage"]
    assert (reported["model"], reported["dialect"]) == (MODEL, dialect)
    assert reported["prompt_tokens"] == usage["prompt_tokens"]
    assert reported["completion_tokens_max"] == usage["completion_tokens"]
    assert str(reported["max_tokens"]) == response.headers["x-max-tokens-applied"]
    assert str(reported["prompt_truncated"]) == response.headers.get("x-prompt-truncated", "0")
    assert reported["ignored_parameters"] == ["zeta"]
    assert reported["context_window"] == WINDOW
    assert reported["parameters"]["temperature"] == (0.8 if dialect in LLAMACPP else 1.0)


@each_dialect("error_style")
def test_estimate_rejects_the_same_requests_as_completions(caller: Caller, dialect: str) -> None:
    body = {"prompt": OPEN, "temperature": 3}

    estimate, response = caller.post(dialect, body, ESTIMATE), caller.post(dialect, body)
    assert (estimate.status_code, estimate.json()) == (response.status_code, response.json())


@each_at_once("prefix", ["", "/v1"])
@each_at_once("text", [COUNTING, "日本の首都は 🚀", ""])
def test_tokenize_and_detokenize_round_trip(caller: Caller, prefix: str, text: str) -> None:
    as_vllm = caller.post(None, {"prompt": text}, f"{prefix}/tokenize").json()
    as_llamacpp = caller.post(None, {"content": text}, f"{prefix}/tokenize").json()

    assert as_vllm["tokens"] == as_llamacpp["tokens"] == ids_of(text)
    assert (as_vllm["count"], as_vllm["max_model_len"]) == (len(ids_of(text)), WINDOW)
    back = caller.post(None, {"tokens": as_vllm["tokens"]}, f"{prefix}/detokenize").json()
    assert back == {"prompt": text}


def test_tokens_need_a_key(caller: Caller) -> None:
    response = caller.post(None, {"prompt": "a"}, "/tokenize", authorization="Bearer sk-nonsense")

    assert response.status_code == 401
