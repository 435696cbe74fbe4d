"""The effect of each sampling parameter on the text."""

import asyncio
import math
from collections.abc import Iterable
from functools import partial
from statistics import mean
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import CompletionChoice

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.completions import (
    complete,
    complete_async,
    logprobs_of,
    text,
    tokens_of,
    usage_of,
    values_of,
)
from tests.e2e.examples import COUNTING, ENDING, EXAMPLES, LONG, OPEN, ids_of

pytestmark = pytest.mark.e2e

TOLERANCE_NATS = 0.05
"""The engine samples from 16-bit logits that it reports with rounding."""


def test_seed_repeats_the_text_and_another_seed_does_not(client: OpenAI) -> None:
    options = {"temperature": 1, "max_tokens": 24}
    first, again, other = texts_of_each(client, OPEN, *({"seed": n, **options} for n in (1, 1, 2)))

    assert again == first
    assert other != first


def texts_of_each(client: OpenAI, prompt: Any, *options: dict[str, Any]) -> list[str]:
    """Return the texts for a prompt with each set of options, requested concurrently."""
    asked = (partial(complete, client, prompt, **each) for each in options)
    return [text(answer) for answer in at_once(*asked)]


def test_without_a_seed_each_text_differs(client: OpenAI) -> None:
    options = {"temperature": 1.5, "max_tokens": 16}

    assert len({*texts_of_each(client, OPEN, *[options] * 4)}) > 1


async def test_seed_repeats_the_text_next_to_sixteen_others(async_client: AsyncOpenAI) -> None:
    options = {"temperature": 1, "max_tokens": 32}
    alone = await complete_async(async_client, OPEN, seed=1, **options)
    prompts = [example.prompt for example in EXAMPLES]
    others = [
        complete_async(
            async_client, prompts[i % len(prompts)], seed=i, temperature=1, max_tokens=40
        )
        for i in range(16)
    ]
    beside, *rest = await asyncio.gather(
        complete_async(async_client, OPEN, seed=1, **options), *others
    )

    assert text(beside) == text(alone)
    assert len({text(other) for other in rest}) > 8, "the others were others"


def test_ignore_eos_continues_to_the_last_token(client: OpenAI) -> None:
    options = {"temperature": 0, "max_tokens": ENDING.max_tokens + 20}
    ended, answer = at_once(
        lambda: complete(client, ENDING.prompt, **options),
        lambda: complete(client, ENDING.prompt, ignore_eos=True, **options),
    )

    assert ended.choices[0].finish_reason == "stop"
    assert usage_of(ended).completion_tokens < ENDING.max_tokens + 20
    assert answer.choices[0].finish_reason == "length"
    assert usage_of(answer).completion_tokens == ENDING.max_tokens + 20
    assert text(answer).startswith(ENDING.completion)
    assert len(text(answer)) > len(ENDING.completion)


def test_logit_bias_forces_a_token(client: OpenAI) -> None:
    token = ids_of(COUNTING)[0]
    answer = complete(client, COUNTING, temperature=1, max_tokens=10, logit_bias={str(token): 100})

    assert text(answer) == text(complete(client, [token], echo=True, max_tokens=0)) * 10


def test_logit_bias_forbids_a_token(client: OpenAI) -> None:
    options = {"temperature": 0, "max_tokens": 16, "logprobs": 0}
    [usual] = complete(client, COUNTING, **options).choices
    [forbidden] = ids_of(tokens_of(usual)[1])
    [choice] = complete(client, COUNTING, logit_bias={str(forbidden): -100}, **options).choices

    assert tokens_of(usual)[1] not in tokens_of(choice)
    assert choice.text != usual.text


@each_at_once(
    "penalty, effect",
    [
        ({"presence_penalty": 2}, 1),
        ({"frequency_penalty": 2}, 1),
        ({"frequency_penalty": -2}, -1),
        ({"repetition_penalty": 1.5}, 1),
    ],
)
def test_penalty_changes_how_much_a_text_repeats(
    client: OpenAI, penalty: dict[str, float], effect: int
) -> None:
    options = {"temperature": 0, "max_tokens": 80, "ignore_eos": True, "logprobs": 0}
    usual, changed = at_once(
        lambda: distinct_tokens(complete(client, COUNTING, **options).choices),
        lambda: distinct_tokens(complete(client, COUNTING, **penalty, **options).choices),
    )

    assert usual < 30, "the usual text repeats few tokens"
    assert (changed - usual) * effect > 0


def distinct_tokens(choices: Iterable[CompletionChoice]) -> int:
    """Return the number of different tokens in the choices."""
    return len({token for choice in choices for token in tokens_of(choice)})


def test_narrowest_sampling_is_greedy(client: OpenAI) -> None:
    options = {"temperature": 1.5, "seed": 3, "max_tokens": LONG.max_tokens}
    narrowings: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 0}, {"min_p": 1}]
    wide, *narrow = texts_of_each(
        client, LONG.prompt, options, *(options | each for each in narrowings)
    )

    assert narrow == [LONG.completion] * len(narrowings)
    assert wide != LONG.completion


def sampled(client: OpenAI, **options: Any) -> list[CompletionChoice]:
    """Sample texts at temperature 1.5, with the five likeliest tokens at each position."""
    options = {"temperature": 1.5, "seed": 3, "n": 12, "max_tokens": 20, "logprobs": 5} | options
    return complete(client, OPEN, **options).choices


@pytest.fixture(scope="module")
def wide(client: OpenAI) -> list[CompletionChoice]:
    """Samples from all tokens."""
    return sampled(client)


def distances(choices: Iterable[CompletionChoice]) -> list[float]:
    """Return how much less likely each token is than the likeliest one, in nats."""
    return [
        max(top.values()) - value
        for choice in choices
        for value, top in zip(
            values_of(choice), logprobs_of(choice).top_logprobs or [], strict=True
        )
    ]


def ranks(choices: Iterable[CompletionChoice]) -> list[int]:
    """Return how many tokens are likelier than each one, as far as they are reported."""
    return [
        sum(other > value + TOLERANCE_NATS for other in top.values())
        for choice in choices
        for value, top in zip(
            values_of(choice), logprobs_of(choice).top_logprobs or [], strict=True
        )
    ]


def test_min_p_drops_unlikely_tokens(client: OpenAI, wide: list[CompletionChoice]) -> None:
    # A token's share is counted after the temperature, which divides distances.
    furthest = 1.5 * -math.log(0.2)

    assert max(distances(wide)) > furthest + TOLERANCE_NATS
    assert max(distances(sampled(client, min_p=0.2))) <= furthest + TOLERANCE_NATS


def test_top_k_keeps_the_likeliest_tokens(client: OpenAI, wide: list[CompletionChoice]) -> None:
    assert max(ranks(wide)) >= 3
    assert max(ranks(sampled(client, top_k=3))) == 2


def test_top_p_narrows_the_choice(client: OpenAI, wide: list[CompletionChoice]) -> None:
    far, near = distances(wide), distances(sampled(client, top_p=0.5))

    assert max(near) < max(far)
    assert mean(near) < mean(far) / 2


def test_higher_temperature_samples_less_likely_tokens(
    client: OpenAI, wide: list[CompletionChoice]
) -> None:
    low, middle = at_once(
        lambda: sampled(client, temperature=0.1), lambda: sampled(client, temperature=0.7)
    )
    assert mean(distances(low)) < mean(distances(middle)) < mean(distances(wide))
