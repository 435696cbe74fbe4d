"""The document of llama.cpp's server, replayed: its examples byte for byte."""

import json
from statistics import mean

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.examples import OPEN, ids_of
from tests.e2e.seeds.arithmetic import begins_sentence, is_sentence
from tests.e2e.seeds.calling import (
    Body,
    Caller,
    check_like,
    documented_answer,
    example,
    example_bytes,
    finishes,
    joined,
    text_of,
    texts_of,
)

pytestmark = pytest.mark.e2e

DIALECT = "llamacpp"


def replay(caller: Caller, name: str) -> Body:
    return caller.complete(DIALECT, example_bytes(name))


def test_request_example_gets_the_answer_example(caller: Caller) -> None:
    answer = replay(caller, "llamacpp_request")

    check_like(documented_answer("llamacpp_standard"), answer)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "gpt-3.5-turbo"
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["prompt_tokens"] == len(ids_of("Once upon a time"))
    assert 0 < answer["usage"]["completion_tokens"] <= 50
    assert text_of(answer)


def test_streamed_chunks_are_like_the_example(caller: Caller) -> None:
    chunks = caller.stream(DIALECT, example("llamacpp_request"))

    for chunk in chunks[:-1]:
        check_like(documented_answer("llamacpp_chunk"), chunk)
        assert chunk["choices"][0]["finish_reason"] is None
    check_like(documented_answer("llamacpp_final_chunk"), chunks[-1])
    [(index, reason)] = finishes(chunks)
    assert (index, reason in ("stop", "length")) == (0, True)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert joined(chunks)


def test_logprobs_example_reports_every_token(caller: Caller) -> None:
    answer = replay(caller, "llamacpp_logprobs")
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]

    assert set(documented_answer("llamacpp_logprobs")["choices"][0]["logprobs"]) <= set(logprobs)
    lengths = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs")}
    assert lengths == {len(logprobs["text_offset"])} == {answer["usage"]["completion_tokens"]}
    assert logprobs["text_offset"][0] == 0
    assert "".join(logprobs["tokens"]).startswith(choice["text"])
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert value <= 0
        assert top[token] == pytest.approx(value)
        # Three, and the chosen token if it is not one of them.
        assert 3 <= len(top) <= 4


def test_batch_example_answers_each_prompt_in_order(caller: Caller) -> None:
    answer = replay(caller, "llamacpp_batch")

    documented = documented_answer("llamacpp_batch")["choices"]
    assert len(texts_of(answer)) == len(documented)
    for expected, choice in zip(documented, answer["choices"], strict=True):
        check_like(expected, choice)
        assert choice["index"] == expected["index"]
        assert choice["text"].startswith(expected["text"])
    prompts = example("llamacpp_batch")["prompt"]
    assert answer["usage"]["prompt_tokens"] == sum(len(ids_of(prompt)) for prompt in prompts)


def test_infill_example_generates_between_prompt_and_suffix(caller: Caller) -> None:
    body = example("llamacpp_infill")
    answer = replay(caller, "llamacpp_infill")

    assert answer["model"] == "codellama"
    markers = 3
    both = len(ids_of(body["prompt"])) + len(ids_of(body["suffix"]))
    assert answer["usage"]["prompt_tokens"] == both + markers
    middle, plain = caller.texts(
        DIALECT, body | {"temperature": 0}, body | {"temperature": 0, "suffix": None}
    )
    assert middle != plain
    assert "<|" not in middle


def test_grammar_example_keeps_to_the_grammar(caller: Caller) -> None:
    answer = replay(caller, "llamacpp_grammar")

    check_sentence(text_of(answer), answer["choices"][0]["finish_reason"])


@each_at_once("seed", range(6))
def test_grammar_holds_for_every_seed_and_in_streams(caller: Caller, seed: int) -> None:
    body = example("llamacpp_grammar") | {"seed": seed, "temperature": 1.5, "max_tokens": 60}
    chunks = caller.stream(DIALECT, body)

    check_sentence(joined(chunks), finishes(chunks)[0][1])


def check_sentence(text: str, reason: str) -> None:
    assert text
    if reason == "stop":
        assert is_sentence(text), text
    else:
        assert begins_sentence(text), text


def test_json_schema_example_gives_json_that_matches(caller: Caller) -> None:
    answer = replay(caller, "llamacpp_json_schema")

    assert text_of(answer).startswith("{")
    if answer["choices"][0]["finish_reason"] == "stop":
        check_product(text_of(answer))


@each_at_once("seed", range(4))
def test_json_schema_holds_to_the_end(caller: Caller, seed: int) -> None:
    body = example("llamacpp_json_schema") | {"seed": seed, "max_tokens": 1500}
    answer = caller.complete(DIALECT, body)

    assert answer["choices"][0]["finish_reason"] == "stop"
    check_product(text_of(answer))


def check_product(text: str) -> None:
    jsonschema.validate(json.loads(text), example("llamacpp_json_schema")["json_schema"])


def test_mirostat_example_runs(caller: Caller) -> None:
    response = caller.post(DIALECT, example_bytes("llamacpp_mirostat"))

    assert response.status_code == 200, response.text
    assert 0 < response.json()["usage"]["completion_tokens"] <= 200
    assert text_of(response.json())
    assert "x-ignored-params" not in response.headers


@each_at_once("version", [1, 2])
def test_mirostat_holds_the_surprise_near_its_target(caller: Caller, version: int) -> None:
    body = {"prompt": OPEN, "max_tokens": 50, "ignore_eos": True, "logprobs": 0, "seed": 5, "n": 8}

    def surprise(tau: float) -> float:
        chosen = {"mirostat": version, "mirostat_tau": tau, "mirostat_eta": 0.1, "temperature": 1}
        choices = caller.complete(DIALECT, body | chosen)["choices"]
        return -mean(float(v) for c in choices for v in c["logprobs"]["token_logprobs"])

    low, high = at_once(lambda: surprise(0.4), lambda: surprise(3.0))
    assert low < high


def test_native_completion_reads_the_example(caller: Caller) -> None:
    body = example("llamacpp_request") | {"seed": 3, "n_probs": 2}
    result = caller.post(DIALECT, body, "/completion").json()
    *partial, final = caller.native_stream(body)
    answer = caller.complete(DIALECT, body | {"logprobs": 2})

    assert result["content"] == text_of(answer) == "".join(part["content"] for part in partial)
    assert (result["prompt"], result["model"]) == (body["prompt"], body["model"])
    tokens = [token for part in partial for token in part["tokens"]]
    assert len(tokens) == final["tokens_predicted"] == result["tokens_predicted"]
    assert [score["id"] for score in result["completion_probabilities"]] == tokens
    for score in result["completion_probabilities"]:
        assert score["logprob"] <= 0
        assert len(score["top_logprobs"]) == 2
        assert all(each["id"] >= 0 for each in score["top_logprobs"])
    assert final["timings"]["predicted_n"] == len(tokens)
    assert final["stop_type"] == ("eos" if final["tokens_predicted"] < 50 else "limit")


def test_probabilities_after_the_samplers_are_returned(caller: Caller) -> None:
    body = {"prompt": OPEN, "n_predict": 8, "n_probs": 5, "seed": 4, "top_k": 2, "min_p": 0}
    post = body | {"post_sampling_probs": True, "temperature": 1.5}
    own, final, greedy, *_ = at_once(
        lambda: caller.post(DIALECT, body | {"temperature": 1.5}, "/completion").json(),
        lambda: caller.post(DIALECT, post, "/completion").json(),
        lambda: caller.post(DIALECT, post | {"temperature": 0}, "/completion").json(),
    )
    assert final["content"] == own["content"]
    assert final["generation_settings"]["post_sampling_probs"] is True
    for before, after in zip(
        own["completion_probabilities"], final["completion_probabilities"], strict=True
    ):
        assert len(before["top_logprobs"]) == 5
        assert 1 <= len(after["top_probs"]) <= 2
        assert sum(each["prob"] for each in after["top_probs"]) == pytest.approx(1)
        assert after["prob"] in [each["prob"] for each in after["top_probs"]]
    assert {each["prob"] for each in greedy["completion_probabilities"]} == {1}


def test_stream_reports_the_processed_prompt(caller: Caller) -> None:
    body = example("llamacpp_request") | {"return_progress": True, "cache_prompt": False}
    native = caller.native_stream(body)
    chunks = caller.stream(DIALECT, body)

    tokens = native[-1]["tokens_evaluated"]
    for events in (native, chunks):
        progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert [each["processed"] for each in progress] == [0, tokens]
        assert {(each["total"], each["cache"]) for each in progress} == {(tokens, 0)}
        assert progress[0] is events[0]["prompt_progress"]
    whole = caller.post(DIALECT, body, "/completion")
    assert whole.headers["x-ignored-params"] == "return_progress"


def test_native_grammar_example_keeps_to_the_grammar(caller: Caller) -> None:
    body = example("llamacpp_grammar")
    result = caller.post(DIALECT, body, "/completion").json()

    check_sentence(result["content"], "stop" if result["stop_type"] == "eos" else "length")
    assert result["generation_settings"]["grammar"] == body["grammar"]


def test_native_infill_is_that_of_the_suffix(caller: Caller) -> None:
    body = example("llamacpp_infill") | {"temperature": 0}
    parts = {"input_prefix": "def fibonacci(n):", "prompt": "\n    "}
    infill = {**parts, "input_suffix": body["suffix"], "max_tokens": 100, "temperature": 0}
    result, middle = (
        caller.post(DIALECT, infill, "/infill").json(),
        caller.complete(DIALECT, body),
    )
    assert body["prompt"] == "".join(parts.values())
    assert result["content"] == text_of(middle)
    # The marks of infill are special tokens, and those in the client's texts are not.
    marks = "<|fim_middle|></s><think>"
    marked = {**infill, "input_prefix": marks, "prompt": marks, "input_suffix": marks}
    tokens = caller.post(DIALECT, {"content": 2 * marks, "parse_special": False}, "/tokenize")
    suffix = caller.post(DIALECT, {"content": marks, "parse_special": False}, "/tokenize")
    evaluated = caller.post(DIALECT, marked, "/infill").json()["tokens_evaluated"]
    assert evaluated == len(tokens.json()["tokens"]) + len(suffix.json()["tokens"]) + 3
    files = [{"filename": "a.py", "text": "def fibonacci(n):\n    return 1\n"}]
    with_files = caller.post(DIALECT, infill | {"input_extra": files}, "/infill").json()
    assert with_files["tokens_evaluated"] > result["tokens_evaluated"]
    assert files[0]["text"] in with_files["prompt"]


def test_last_message_of_the_assistant_is_continued(caller: Caller) -> None:
    messages = [
        {"role": "user", "content": "What is 2 plus 3?"},
        {"role": "assistant", "content": "2 plus"},
    ]
    body = {"messages": messages, "temperature": 0, "max_tokens": 20}
    rendered = caller.post(DIALECT, {"messages": messages}, "/apply-template").json()["prompt"]
    assert rendered.endswith("2 plus")
    answer = caller.post(DIALECT, body, "/chat/completions").json()
    plain = {"prompt": rendered, "add_special_tokens": False, "temperature": 0, "n_predict": 20}
    result = caller.post(DIALECT, plain, "/completion").json()
    assert answer["choices"][0]["message"]["content"] == result["content"]


def test_missing_prompt_is_the_error_example(caller: Caller) -> None:
    documented = documented_answer("llamacpp_error")
    response = caller.post(DIALECT, {"max_tokens": 1})

    assert response.status_code == documented["error"]["code"] == 400
    check_like(documented, response.json())
    error = response.json()["error"]
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert "prompt" in error["message"]
