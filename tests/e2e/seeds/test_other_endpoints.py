"""Estimates and tokenisation: they agree with the completions that follow."""

import json

import pytest

from tests.e2e.at_once import each_at_once
from tests.e2e.examples import COUNTING, OPEN, TOKENIZER, ids_of
from tests.e2e.seeds.calling import CHATS, LLAMACPP, Body, Caller, each_dialect
from tests.support.stack import CHECKPOINT, MODEL

pytestmark = pytest.mark.e2e

ESTIMATE = "/v1/completions:estimate"
WINDOW = 2048
HELLO = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


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


@each_at_once("prefix", ["", "/v1"])
@each_at_once(
    "given",
    [
        {},
        {"tools": [TOOL], "return_token_strs": True},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"messages": [HELLO, ANSWER], "continue_final_message": True},
    ],
)
def test_tokenized_chat_is_the_prompt_of_the_chat(caller: Caller, prefix: str, given: Body) -> None:
    body = {"messages": [HELLO]} | given
    tokenized = caller.post("vllm", body, f"{prefix}/tokenize").json()
    strings = tokenized.pop("token_strs")
    body.pop("return_token_strs", None)
    chat = caller.complete("vllm", body | {"return_token_ids": True, "max_tokens": 1}, CHATS)

    ids = chat["prompt_token_ids"]
    assert tokenized == {"count": len(ids), "max_model_len": WINDOW, "tokens": ids}
    assert strings == (
        [TOKENIZER.id_to_token(token) for token in ids] if "tools" in given else None
    )


def test_chat_is_tokenized_without_the_beginning_of_an_answer(caller: Caller) -> None:
    body = {"messages": [HELLO, ANSWER], "add_generation_prompt": False}
    tokens = caller.post(None, body, "/tokenize").json()["tokens"]

    assert tokens == ids_of("<|user|>Hello\n<|assistant|>Hi</s>")


@each_at_once("path", ["/tokenizer_info", f"/v1/tokenizer_info?model={MODEL}"])
def test_tokenizer_is_described(caller: Caller, path: str) -> None:
    response = caller.get(path)
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())

    described = response.json()
    for name in ("bos_token", "eos_token", "model_max_length"):
        assert described[name] == config[name]
    assert described["chat_template"] == (CHECKPOINT / "chat_template.jinja").read_text()
    assert described["tokenizer_class"] == "PreTrainedTokenizerFast"
    [user] = ids_of("<|user|>")
    assert described["added_tokens_decoder"][str(user)] == "<|user|>"
    assert str(CHECKPOINT.parent) not in response.text


def test_tokens_need_a_key(caller: Caller) -> None:
    response = caller.post(None, {"prompt": "a"}, "/tokenize", authorization="Bearer sk-nonsense")

    assert response.status_code == 401
