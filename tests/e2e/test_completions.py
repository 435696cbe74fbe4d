"""Forms of a request, on the real engine: prompts, choices, streams."""

import asyncio
from functools import partial
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.completions import (
    choices_of,
    complete,
    complete_async,
    finish_reasons,
    in_pieces,
    joined,
    logprobs_of,
    streamed,
    streamed_async,
    text,
    texts,
    usage_of,
    values_of,
)
from tests.e2e.examples import (
    COUNTING,
    ENDING,
    EXAMPLES,
    LONG,
    MULTI_BYTE,
    OPEN,
    TOKENIZER,
    Example,
    ids_of,
)

pytestmark = pytest.mark.e2e

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@each_at_once("example", EXAMPLES)
def test_example_gives_its_completion(client: OpenAI, example: Example) -> None:
    answer = complete(client, example.prompt, temperature=0, max_tokens=example.max_tokens)

    assert text(answer) == example.completion
    assert answer.choices[0].finish_reason == example.finish_reason


async def test_async_client_gets_the_same_answers(async_client: AsyncOpenAI) -> None:
    options = {"temperature": 0, "max_tokens": LONG.max_tokens}
    answer, chunks = await asyncio.gather(
        complete_async(async_client, LONG.prompt, **options),
        streamed_async(async_client, LONG.prompt, **options),
    )

    assert text(answer) == LONG.completion
    assert joined(chunks) == LONG.completion


def test_response_has_the_fields_of_openai(client: OpenAI) -> None:
    answer = complete(client, ENDING.prompt, temperature=0)

    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.created > 1_600_000_000
    assert answer.choices[0].index == 0
    assert answer.choices[0].logprobs is None
    assert usage_of(answer).completion_tokens == 16, "the default of max_tokens"


@each_at_once("example", [ENDING, LONG])
def test_stream_joins_to_the_plain_text(client: OpenAI, example: Example) -> None:
    options = {"temperature": 0, "max_tokens": example.max_tokens}
    chunks = in_pieces(lambda: streamed(client, example.prompt, **options), pieces=len, least=6)

    assert joined(chunks) == example.completion
    assert finish_reasons(chunks) == [example.finish_reason]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert all(choice.text for choice in choices_of(chunks)[:-1]), "no empty piece before the end"


@each_at_once("example", MULTI_BYTE)
def test_stream_never_splits_a_character(client: OpenAI, example: Example) -> None:
    chunks = streamed(client, example.prompt, temperature=0, max_tokens=example.max_tokens)

    assert REPLACEMENT not in "".join(choice.text for choice in choices_of(chunks))
    assert joined(chunks) == example.completion


def test_stream_of_arbitrary_bytes_joins_to_the_plain_text(client: OpenAI) -> None:
    prompt = MULTI_BYTE[0].prompt + MULTI_BYTE[0].completion
    options = {"temperature": 2, "seed": 3, "n": 4, "max_tokens": 50, "ignore_eos": True}
    plain, chunks = at_once(
        lambda: texts(complete(client, prompt, **options)),
        lambda: streamed(client, prompt, **options),
    )

    assert not any(each.isascii() for each in plain)
    assert [joined(chunks, index) for index in range(4)] == plain


def test_each_choice_samples_with_its_own_seed(client: OpenAI) -> None:
    options = {"temperature": 1, "max_tokens": 24}
    three, *alone = at_once(
        partial(complete, client, OPEN, n=3, seed=50, **options),
        *(partial(complete, client, OPEN, seed=50 + i, **options) for i in range(3)),
    )

    assert len(set(texts(three))) == 3
    assert texts(three) == [text(each) for each in alone]


def test_streamed_choices_interleave_under_their_own_index(client: OpenAI) -> None:
    options = {"temperature": 1, "max_tokens": 24, "n": 3, "seed": 50}
    plain, chunks = at_once(
        lambda: complete(client, OPEN, **options), lambda: streamed(client, OPEN, **options)
    )

    assert [joined(chunks, i) for i in range(3)] == texts(plain)
    assert [finish_reasons(chunks, i) for i in range(3)] == [
        [choice.finish_reason] for choice in plain.choices
    ]
    order = [choice.index for chunk in chunks for choice in chunk.choices]
    assert order != sorted(order), "the choices came side by side, not one after the other"


def test_greedy_choices_are_equal_and_all_counted(client: OpenAI) -> None:
    one, three = at_once(
        lambda: complete(client, LONG.prompt, temperature=0, max_tokens=20),
        lambda: complete(client, LONG.prompt, temperature=0, max_tokens=20, n=3),
    )

    assert texts(three) == [text(one)] * 3
    assert usage_of(three).completion_tokens == 3 * usage_of(one).completion_tokens
    assert usage_of(three).prompt_tokens == usage_of(one).prompt_tokens


def test_best_of_returns_the_likeliest_and_counts_all(client: OpenAI) -> None:
    first_two = []
    seeds = (10, 20, 30)
    options = {"temperature": 1, "max_tokens": 12}
    answers = at_once(
        *(partial(complete, client, OPEN, n=4, logprobs=0, seed=n, **options) for n in seeds),
        *(partial(complete, client, OPEN, n=2, best_of=4, seed=n, **options) for n in seeds),
    )
    for candidates, best in zip(answers[: len(seeds)], answers[len(seeds) :], strict=True):
        means = {c.text: sum(values_of(c)) / len(values_of(c)) for c in candidates.choices}
        assert len(means) == 4
        assert texts(best) == sorted(means, key=lambda candidate: -means[candidate])[:2]
        assert usage_of(best).completion_tokens == usage_of(candidates).completion_tokens
        assert all(choice.logprobs is None for choice in best.choices)
        first_two.append(texts(candidates)[:2] == texts(best))
    assert not all(first_two), "the best were not simply the first"


def test_best_of_with_logprobs_reports_those_of_the_returned(client: OpenAI) -> None:
    answer = complete(
        client, OPEN, temperature=1, seed=10, max_tokens=12, n=2, best_of=4, logprobs=1
    )

    means = [sum(values_of(c)) / len(values_of(c)) for c in answer.choices]
    assert means == sorted(means, reverse=True)
    for choice in answer.choices:
        assert "".join(logprobs_of(choice).tokens or []) == choice.text


def test_prompt_list_gives_each_prompt_its_choices_in_order(client: OpenAI) -> None:
    prompts = [example.prompt for example in EXAMPLES[-5:]]
    options = {"temperature": 0, "max_tokens": 8}
    answer, *each_alone = at_once(
        partial(complete, client, prompts, n=2, **options),
        *(partial(complete, client, prompt, **options) for prompt in prompts),
    )
    alone = [text(each) for each in each_alone]

    assert len(set(alone)) == 5
    assert texts(answer) == [each for each in alone for _ in range(2)]
    assert usage_of(answer).prompt_tokens == sum(len(ids_of(prompt)) for prompt in prompts)


def test_streamed_prompt_list_keeps_its_indices(client: OpenAI) -> None:
    prompts = [example.prompt for example in EXAMPLES[-5:]]
    options = {"temperature": 0, "max_tokens": 8, "n": 2}
    plain, chunks = at_once(
        lambda: texts(complete(client, prompts, **options)),
        lambda: streamed(client, prompts, **options),
    )

    assert [joined(chunks, i) for i in range(10)] == plain
    assert all(len(finish_reasons(chunks, i)) == 1 for i in range(10))


def test_token_ids_are_one_prompt(client: OpenAI) -> None:
    ids = ids_of(LONG.prompt)
    answer = complete(client, ids, temperature=0, max_tokens=LONG.max_tokens)

    assert text(answer) == LONG.completion
    assert usage_of(answer).prompt_tokens == len(ids)


def test_lists_of_token_ids_are_several_prompts(client: OpenAI) -> None:
    prompts = [COUNTING, LONG.prompt, ENDING.prompt]
    options = {"temperature": 0, "max_tokens": 12}
    by_text, by_ids = at_once(
        lambda: complete(client, prompts, **options),
        lambda: complete(client, [ids_of(prompt) for prompt in prompts], **options),
    )

    assert len(set(texts(by_text))) == 3
    assert texts(by_ids) == texts(by_text)
    assert usage_of(by_ids) == usage_of(by_text)


def test_mixed_list_is_one_prompt(client: OpenAI) -> None:
    first, second = LONG.prompt[:6], LONG.prompt[6:]
    mixed: list[Any] = [first, *ids_of(second)]
    ids = ids_of(first) + ids_of(second)
    options = {"temperature": 0, "max_tokens": 20, "echo": True}
    answer, by_ids = at_once(
        lambda: complete(client, mixed, **options), lambda: complete(client, ids, **options)
    )

    assert text(answer) == text(by_ids)
    assert text(answer).startswith(LONG.prompt)
    assert usage_of(answer).prompt_tokens == len(ids)


def test_list_of_text_ids_and_mixed_list_is_several_prompts(client: OpenAI) -> None:
    options = {"temperature": 0, "max_tokens": 20}
    ids = ids_of(LONG.prompt)
    rest = LONG.prompt[len(TOKENIZER.decode(ids[:1])) :]
    prompts: list[Any] = [LONG.prompt, ids_of(COUNTING), [ids[0], rest]]
    alone = [LONG.prompt, COUNTING, ids[:1] + ids_of(rest)]
    answer, *others = at_once(
        *(partial(complete, client, prompt, **options) for prompt in [prompts, *alone])
    )

    assert LONG.completion.startswith(texts(answer)[0])
    assert texts(answer) == [text(each) for each in others]
