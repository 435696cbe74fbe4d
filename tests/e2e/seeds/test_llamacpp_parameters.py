"""The document of llama.cpp's server: its guarantees for each parameter."""

from typing import Any

import pytest

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.examples import COUNTING, LONG, OPEN, ids_of
from tests.e2e.seeds.calling import (
    Body,
    Caller,
    check_defaults,
    check_usage,
    finishes,
    text_of,
    texts_of,
)

pytestmark = pytest.mark.e2e

DIALECT = "llamacpp"
BLOCK_TOKENS = 128
"""Block size of vLLM's prefix cache on a CPU."""

DEFAULTS: Body = {
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.05,
    "stream": False,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repeat_penalty": 1.1,
    "n": 1,
    "echo": False,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "cache_prompt": True,
}


@each_at_once("name", ["gpt-3.5-turbo", "/models/some.gguf", "alias", "x" * 64])
def test_any_model_name_is_served_when_there_is_one_model(caller: Caller, name: str) -> None:
    answer = caller.complete(DIALECT, {"model": name, "prompt": OPEN, "max_tokens": 1})

    assert answer["model"] == name


@each_at_once(
    "prompt, prompts",
    [
        ("Once upon a time", 1),
        ([12, 34, 56], 1),
        (["prompt1", "prompt2"], 2),
        ([12, 34, "string", 56], 1),
    ],
)
def test_every_form_of_prompt_is_accepted(caller: Caller, prompt: Any, prompts: int) -> None:
    answer = caller.complete(DIALECT, {"prompt": prompt, "max_tokens": 2})

    assert len(texts_of(answer)) == prompts


def test_mixed_prompt_is_one_prompt_in_its_order(caller: Caller) -> None:
    answer = caller.complete(
        DIALECT, {"prompt": [12, 34, "string", 56], "max_tokens": 2, "echo": True}
    )

    assert "string" in text_of(answer)
    assert answer["usage"]["prompt_tokens"] == 3 + len(ids_of("string"))


def test_defaults_are_those_of_the_document(caller: Caller) -> None:
    body = {"prompt": OPEN, "max_tokens": 32}
    others = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}

    check_defaults(caller, DIALECT, body, defaults=DEFAULTS, others=others)


@each_at_once("limit", [{}, {"max_tokens": -1}, {"max_tokens": None}])
def test_unlimited_completion_is_the_default(caller: Caller, limit: Body) -> None:
    room = 40
    prompt = [5] * (2048 - room)
    response = caller.post(DIALECT, {"prompt": prompt, "ignore_eos": True} | limit)

    assert response.headers["x-max-tokens-applied"] == str(room)
    assert response.json()["usage"]["completion_tokens"] == room


def test_stop_words_are_not_in_the_output(caller: Caller) -> None:
    body = {"prompt": COUNTING, "max_tokens": 40, "temperature": 0, "repeat_penalty": 1.0}
    answer = caller.complete(DIALECT, body | {"stop": [" 8", " never"]})

    assert text_of(answer) == " 5, 6, 7,"
    assert answer["choices"][0]["finish_reason"] == "stop"


@each_at_once("seed", [0, 42, 2**32 - 1])
def test_seed_makes_output_reproducible(caller: Caller, seed: int) -> None:
    body = {"prompt": OPEN, "max_tokens": 24, "temperature": 1.5, "seed": seed}
    first, again = caller.texts(DIALECT, body, body)

    assert first == again


def test_seed_minus_one_is_random(caller: Caller) -> None:
    body = {"prompt": OPEN, "max_tokens": 16, "temperature": 2, "seed": -1, "n": 1}

    assert len({*caller.texts(DIALECT, *[body] * 4)}) > 1


def test_n_completions_for_each_prompt(caller: Caller) -> None:
    body = {"prompt": [OPEN, COUNTING], "n": 3, "max_tokens": 5}
    answer, chunks = at_once(
        lambda: caller.complete(DIALECT, body), lambda: caller.stream(DIALECT, body)
    )

    assert len(texts_of(answer)) == 6
    assert sorted(index for index, _ in finishes(chunks)) == list(range(6))
    assert answer["usage"]["prompt_tokens"] == len(ids_of(OPEN)) + len(ids_of(COUNTING))


def test_echo_returns_the_prompt_before_the_completion(caller: Caller) -> None:
    body = {"prompt": LONG.prompt, "max_tokens": 5, "temperature": 0}
    plain, echoed = caller.texts(DIALECT, body, body | {"echo": True})

    assert echoed == LONG.prompt + plain


def test_cache_prompt_decides_whether_earlier_requests_are_reused(caller: Caller) -> None:
    prompt = [7] * (2 * BLOCK_TOKENS + 1)

    def cached(**options: Any) -> int:
        answer = caller.complete(DIALECT, {"prompt": prompt, "max_tokens": 1, **options})
        count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    cached()
    assert cached() == 2 * BLOCK_TOKENS
    assert cached(cache_prompt=False) == 0
    assert cached(cache_prompt=True) == 2 * BLOCK_TOKENS


def test_usage_is_in_the_last_chunk(caller: Caller) -> None:
    *_, last = caller.stream(DIALECT, {"prompt": OPEN, "max_tokens": 3})

    check_usage(last["usage"])


def test_timings_are_returned(caller: Caller) -> None:
    timings = caller.complete(DIALECT, {"prompt": OPEN, "max_tokens": 3})["timings"]

    names = ("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms")
    assert set(names) <= set(timings)
    assert timings["predicted_n"] <= 3
