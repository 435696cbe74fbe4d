"""Prompt and completion share one window: what does not fit is cut or rejected, as requested."""

import json

import pytest
from openai import BadRequestError, OpenAI

from tests.e2e.at_once import each_at_once
from tests.e2e.completions import complete, parameters, streamed, usage_of
from tests.e2e.examples import COUNTING, LONG, ids_of
from tests.support.stack import CHECKPOINT, MODEL

pytestmark = pytest.mark.e2e

WINDOW: int = json.loads((CHECKPOINT / "config.json").read_text())["max_position_embeddings"]
TRUNCATE = {"context_length_exceeded_behavior": "truncate"}
ERROR = {"context_length_exceeded_behavior": "error"}


def prompt_of(tokens: int) -> list[int]:
    """Return a prompt of so many tokens."""
    ids = ids_of(LONG.prompt)
    return (ids * (tokens // len(ids) + 1))[:tokens]


def test_model_announces_its_window(client: OpenAI) -> None:
    assert client.models.retrieve(MODEL).model_dump()["context_window"] == WINDOW


def test_truncate_lowers_max_tokens_to_what_fits(client: OpenAI) -> None:
    options = {"max_tokens": 50, "ignore_eos": True} | TRUNCATE
    raw = client.completions.with_raw_response.create(**parameters(prompt_of(WINDOW - 5), options))
    answer = raw.parse()

    assert raw.headers["x-max-tokens-applied"] == "5"
    assert usage_of(answer).completion_tokens == 5
    assert usage_of(answer).prompt_tokens == WINDOW - 5
    assert answer.choices[0].finish_reason == "length"


def test_header_names_max_tokens_when_all_fits(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(**parameters(COUNTING, {"max_tokens": 7}))

    assert raw.headers["x-max-tokens-applied"] == "7"


def test_unlimited_max_tokens_are_the_rest_of_the_window(client: OpenAI) -> None:
    options = {"max_tokens": -1, "ignore_eos": True}
    raw = client.completions.with_raw_response.create(**parameters(prompt_of(WINDOW - 9), options))

    assert raw.headers["x-max-tokens-applied"] == "9"
    assert usage_of(raw.parse()).completion_tokens == 9


def test_header_has_the_lowest_max_tokens_of_several_prompts(client: OpenAI) -> None:
    prompts = [prompt_of(20), prompt_of(WINDOW - 3)]
    raw = client.completions.with_raw_response.create(
        **parameters(prompts, {"max_tokens": 10, "ignore_eos": True} | TRUNCATE)
    )

    assert raw.headers["x-max-tokens-applied"] == "3"
    assert usage_of(raw.parse()).completion_tokens == 10 + 3


@each_at_once("behavior", [{}, ERROR])
def test_error_rejects_what_does_not_fit(client: OpenAI, behavior: dict[str, str]) -> None:
    with pytest.raises(BadRequestError) as caught:
        complete(client, prompt_of(WINDOW - 5), max_tokens=6, **behavior)

    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "max_tokens"
    for number in (WINDOW, WINDOW - 5, 6, WINDOW + 1):
        assert str(number) in caught.value.message


@each_at_once("behavior", [{}, ERROR])
def test_error_accepts_what_just_fits(client: OpenAI, behavior: dict[str, str]) -> None:
    answer = complete(client, prompt_of(WINDOW - 5), max_tokens=5, ignore_eos=True, **behavior)

    assert usage_of(answer).completion_tokens == 5


@each_at_once("behavior", [TRUNCATE, ERROR])
@each_at_once("stream", [False, True])
def test_prompt_longer_than_the_window_is_refused(
    client: OpenAI, behavior: dict[str, str], stream: bool
) -> None:
    ask = streamed if stream else complete
    with pytest.raises(BadRequestError) as caught:
        ask(client, prompt_of(WINDOW + 1), max_tokens=1, **behavior)

    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    assert str(WINDOW + 1) in caught.value.message
