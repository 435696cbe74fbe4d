"""Log-probabilities and the echoed prompt, with offsets into the returned text."""

import math
from typing import Any

import pytest
from openai import OpenAI
from openai.types import CompletionChoice
from openai.types.completion_choice import Logprobs

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.completions import (
    choices_of,
    complete,
    in_pieces,
    logprobs_of,
    streamed,
    text,
    texts,
    tokens_of,
    usage_of,
    values_of,
)
from tests.e2e.examples import COUNTING, LONG, MULTI_BYTE, OPEN, SPECIAL, TOKENIZER, ids_of
from tests.e2e.seeds.calling import CHATS, Caller

pytestmark = pytest.mark.e2e


def check_offsets(choice: CompletionChoice) -> None:
    """Every token's text must be at its offset, one after the other."""
    logprobs = logprobs_of(choice)
    tokens, offsets = logprobs.tokens or [], logprobs.text_offset or []
    assert offsets[0] == 0
    for token, offset in zip(tokens, offsets, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    ends = [offset + len(token) for token, offset in zip(tokens, offsets, strict=True)]
    assert ends == [*offsets[1:], len(choice.text)]


@each_at_once("number", [0, 1, 5])
def test_logprobs_report_the_token_and_its_alternatives(client: OpenAI, number: int) -> None:
    answer = complete(client, OPEN, temperature=1.3, seed=4, max_tokens=16, logprobs=number)

    [choice] = answer.choices
    check_offsets(choice)
    top = logprobs_of(choice).top_logprobs or []
    for token, value, alternatives in zip(tokens_of(choice), values_of(choice), top, strict=True):
        assert alternatives[token] == value <= 0
        assert max(number, 1) <= len(alternatives) <= number + 1
        assert list(alternatives.values()) == sorted(alternatives.values(), reverse=True)
        assert sum(math.exp(each) for each in alternatives.values()) < 1.01
    assert len(tokens_of(choice)) == usage_of(answer).completion_tokens
    assert number < 5 or any(len(alternatives) == 6 for alternatives in top), "none was unlikely"


def test_greedy_takes_the_likeliest_token(client: OpenAI) -> None:
    answer = complete(client, LONG.prompt, temperature=0, max_tokens=32, logprobs=5)

    for value, top in zip(
        values_of(answer.choices[0]), logprobs_of(answer.choices[0]).top_logprobs or [], strict=True
    ):
        assert value == max(top.values())
        assert len(top) == 5
    assert LONG.completion.startswith(text(answer))


def test_streamed_logprobs_are_the_plain_ones(client: OpenAI) -> None:
    options = {"temperature": 1, "seed": 8, "max_tokens": 24, "logprobs": 2}

    def streamed_logprobs() -> list[Logprobs]:
        chunks = streamed(client, MULTI_BYTE[0].prompt, **options)
        return [logprobs_of(choice) for choice in choices_of(chunks) if choice.logprobs is not None]

    answer, pieces = at_once(
        lambda: complete(client, MULTI_BYTE[0].prompt, **options),
        lambda: in_pieces(streamed_logprobs, pieces=len),
    )
    plain = logprobs_of(answer.choices[0])

    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for piece in pieces for each in getattr(piece, name)] == getattr(plain, name)


def test_echo_puts_the_prompt_before_every_choice(client: OpenAI) -> None:
    options = {"temperature": 0, "max_tokens": 8, "n": 2}
    plain, echoed = at_once(
        lambda: complete(client, [COUNTING, LONG.prompt], **options),
        lambda: complete(client, [COUNTING, LONG.prompt], echo=True, **options),
    )

    prompts = [COUNTING, COUNTING, LONG.prompt, LONG.prompt]
    assert texts(echoed) == [
        prompt + completion for prompt, completion in zip(prompts, texts(plain), strict=True)
    ]
    assert usage_of(echoed) == usage_of(plain)


def test_echo_of_token_ids_shows_their_text(client: OpenAI) -> None:
    ids = ids_of(MULTI_BYTE[0].prompt)
    answer = complete(client, ids, temperature=0, max_tokens=4, echo=True)

    assert text(answer).startswith(TOKENIZER.decode(ids))


@each_at_once(
    "prompt", [COUNTING, SPECIAL.prompt, MULTI_BYTE[0].prompt, "😀日本 lift-off! ", "lift-off! "]
)
def test_echo_with_logprobs_scores_the_prompt(client: OpenAI, prompt: str) -> None:
    options = {"temperature": 0, "max_tokens": 4, "logprobs": 2}
    ids = ids_of(prompt)
    [plain], [choice] = at_once(
        lambda: complete(client, prompt, **options).choices,
        lambda: complete(client, prompt, echo=True, **options).choices,
    )

    logprobs = logprobs_of(choice)
    values: list[Any] = list(logprobs.token_logprobs or [])
    top: list[Any] = list(logprobs.top_logprobs or [])
    assert choice.text == prompt + plain.text
    check_offsets(choice)
    assert "".join(tokens_of(choice)[: len(ids)]) == prompt
    assert values[0] is top[0] is None
    assert all(value <= 0 for value in values[1 : len(ids)])
    assert all(2 <= len(alternatives) <= 3 for alternatives in top[1:])
    assert tokens_of(choice)[len(ids) :] == tokens_of(plain)
    assert values[len(ids) :] == pytest.approx(values_of(plain), abs=0.1)


def test_parts_of_characters_have_their_bytes(caller: Caller) -> None:
    text = "日本😀"
    forced = {"temperature": 0, "structured_outputs": {"choice": [text]}, "max_tokens": 32}
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 9}
    ids = ids_of(text)
    whole, result, echoed = at_once(
        lambda: caller.post("openai", forced | chat, CHATS).json(),
        lambda: caller.post("llamacpp", forced | {"prompt": "a", "n_probs": 9}, "/completion"),
        lambda: caller.complete(
            "vllm", {"prompt": [*ids, ids[0]], "echo": True, "max_tokens": 0, "logprobs": 20}
        ),
    )

    for scores in (
        whole["choices"][0]["logprobs"]["content"],
        result.json()["completion_probabilities"],
    ):
        tokens = [score for score in scores if score["token"] != "</s>"]
        assert len(tokens) > len(text), "each character has several tokens"
        assert b"".join(bytes(each["bytes"]) for each in tokens) == text.encode()
        assert "".join(each["token"] for each in tokens) == text
        others = [other for each in scores for other in each["top_logprobs"]]
        assert all(
            other["token"] == "\ufffd" or bytes(other["bytes"]).decode() == other["token"]
            for other in others
            if other["token"] not in ("", *text)
        )
        assert any(bytes(other["bytes"])[:1] > b"\x7f" for other in others)
    choice = echoed["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == text + "\ufffd"
    top = choice["logprobs"]["top_logprobs"][1:]
    assert all(20 <= len(each) <= 21 for each in top)
    assert any(key.startswith("bytes:\\x") for each in top for key in each)


def test_prompt_scores_are_those_of_the_same_text_generated(client: OpenAI) -> None:
    [generated] = complete(client, COUNTING, temperature=0, max_tokens=12, logprobs=0).choices
    tokens = len(ids_of(COUNTING))
    [scored] = complete(
        client, COUNTING + generated.text, max_tokens=0, echo=True, logprobs=0
    ).choices

    assert tokens_of(scored)[tokens:] == tokens_of(generated), "both are cut into the same tokens"
    scores = (logprobs_of(scored).token_logprobs or [])[tokens:]
    assert scores == pytest.approx(values_of(generated), abs=0.2)


def test_echo_without_completion_tokens_returns_the_prompt_alone(client: OpenAI) -> None:
    answer = complete(client, LONG.prompt, max_tokens=0, echo=True, logprobs=1)

    [choice] = answer.choices
    assert choice.text == LONG.prompt
    assert choice.finish_reason == "length"
    assert len(tokens_of(choice)) == len(ids_of(LONG.prompt))
    assert usage_of(answer).completion_tokens == 0
    assert usage_of(answer).prompt_tokens == len(ids_of(LONG.prompt))


def test_streamed_echo_with_logprobs_is_the_plain_one(client: OpenAI) -> None:
    options = {"temperature": 0, "max_tokens": 8, "logprobs": 1, "echo": True}
    [plain], choices = at_once(
        lambda: complete(client, LONG.prompt, **options).choices,
        lambda: choices_of(streamed(client, LONG.prompt, **options)),
    )

    assert "".join(choice.text for choice in choices) == plain.text
    pieces = [logprobs_of(choice) for choice in choices if choice.logprobs is not None]
    offsets = [offset for piece in pieces for offset in piece.text_offset or []]
    assert offsets == logprobs_of(plain).text_offset
