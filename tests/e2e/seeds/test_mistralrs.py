"""The document of mistral.rs, replayed: its example byte for byte, then what no other API has."""

import pytest

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.examples import COUNTING, OPEN, ids_of
from tests.e2e.seeds.calling import (
    Caller,
    check_usage,
    example,
    example_bytes,
    finishes,
    joined,
    text_of,
    texts_of,
)

pytestmark = pytest.mark.e2e

DIALECT = "mistralrs"


def test_example_is_streamed_to_its_stop_string(caller: Caller) -> None:
    chunks = caller.stream(DIALECT, example_bytes("mistralrs_request"))

    # The regex allows one text only, and the stop string is that text: nothing is left of it.
    assert joined(chunks) == ""
    assert finishes(chunks) == [(0, "stop")]
    assert {chunk["model"] for chunk in chunks} == {"mistral"}
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    usage = chunks[-1]["usage"]
    check_usage(usage)
    assert usage["prompt_tokens"] == len(ids_of("Say this is a test."))
    assert 0 < usage["completion_tokens"] <= 16


def test_example_ignores_only_user(caller: Caller) -> None:
    response = caller.post(DIALECT, example_bytes("mistralrs_request"))

    ignored = set(response.headers.get("x-ignored-params", "").split(",")) - {""}
    # `user` is for abuse tracking: it has no effect on the response.
    assert ignored <= {"user"}


def test_example_without_stop_matches_its_regex(caller: Caller) -> None:
    body = example("mistralrs_request") | {"stop": None, "stream": False}

    assert text_of(caller.complete(DIALECT, body)) == "example"


def test_model_default_is_the_only_model(caller: Caller) -> None:
    answer = caller.complete(
        DIALECT, {"model": "default", "prompt": COUNTING, "max_tokens": 8, "temperature": 0}
    )

    assert text_of(answer).startswith(" 5, 6,")


@each_at_once("best_of", [1, 2, 4])
def test_best_of_keeps_the_likeliest_choices(caller: Caller, best_of: int) -> None:
    # Few tokens: batches that are sampled at another time may round differently.
    body = {"prompt": OPEN, "n": 4, "max_tokens": 3, "seed": 3, "logprobs": 0}
    whole, answer = at_once(
        lambda: caller.complete(DIALECT, body),
        lambda: caller.complete(DIALECT, body | {"best_of": best_of}),
    )
    everything = whole["choices"]

    likeliest = sorted(everything, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert texts_of(answer) == [choice["text"] for choice in likeliest[:best_of]]
    assert len(texts_of(answer)) == best_of


def test_dry_does_not_reach_across_a_breaker(caller: Caller) -> None:
    body = {"prompt": f"{COUNTING} 5, 6, 7.\n{COUNTING}", "max_tokens": 12, "temperature": 0}
    dry = {"dry_multiplier": 5.0, "dry_allowed_length": 1}
    breakers = {"dry_sequence_breakers": [" ", ",", *"0123456789"]}
    plain, broken, penalized = caller.texts(DIALECT, body, body | dry | breakers, body | dry)

    assert broken == plain
    assert penalized != plain
