"""What each sampling parameter does to the text."""

import asyncio
import math
from collections.abc import Iterable
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import CompletionChoice

from tests.e2e.asking import (
    complete,
    complete_async,
    logprobs_of,
    text,
    tokens_of,
    usage_of,
    values_of,
)
from tests.e2e.examples import COUNTING, ENDING, EXAMPLES, LONG, OPEN, ids_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TOLERANCE_NATS = 0.05
"""The engine samples from 16-bit logits that it reports with rounding."""


def test_seed_repeats_the_text_and_another_seed_does_not(client: OpenAI) -> None:
    options = {"temperature": 1, "max_tokens": 40}
    first = text(complete(client, OPEN, seed=1, **options))

    assert text(complete(client, OPEN, seed=1, **options)) == first
    assert text(complete(client, OPEN, seed=2, **options)) != first


def test_no_seed_is_another_seed_each_time(client: OpenAI) -> None:
    answers = {text(complete(client, OPEN, temperature=1.5, max_tokens=30)) for _ in range(4)}

    assert len(answers) > 1


async def test_seed_repeats_the_text_beside_sixteen_others(async_client: AsyncOpenAI) -> None:
    options = {"temperature": 1, "max_tokens": 40}
    alone = await complete_async(async_client, OPEN, seed=1, **options)
    prompts = [example.prompt for example in EXAMPLES]
    others = [
        complete_async(
            async_client, prompts[i % len(prompts)], seed=i, temperature=1, max_tokens=90
        )
        for i in range(16)
    ]
    beside, *rest = await asyncio.gather(
        complete_async(async_client, OPEN, seed=1, **options), *others
    )

    assert text(beside) == text(alone)
    assert len({text(other) for other in rest}) > 8, "the others were others"


def test_ignore_eos_goes_on_to_the_last_token(client: OpenAI) -> None:
    options = {"temperature": 0, "max_tokens": ENDING.max_tokens + 20}
    ended = complete(client, ENDING.prompt, **options)
    answer = complete(client, ENDING.prompt, ignore_eos=True, **options)

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
    options = {"temperature": 0, "max_tokens": 30, "logprobs": 0}
    [usual] = complete(client, COUNTING, **options).choices
    [forbidden] = ids_of(tokens_of(usual)[1])
    [choice] = complete(client, COUNTING, logit_bias={str(forbidden): -100}, **options).choices

    assert tokens_of(usual)[1] not in tokens_of(choice)
    assert choice.text != usual.text


@pytest.mark.parametrize(
    ("penalty", "effect"),
    [
        ({"presence_penalty": 2}, 1),
        ({"frequency_penalty": 2}, 1),
        ({"frequency_penalty": -2}, -1),
        ({"repetition_penalty": 1.5}, 1),
    ],
    ids=str,
)
def test_penalty_changes_how_much_a_text_repeats(
    client: OpenAI, penalty: dict[str, float], effect: int
) -> None:
    options = {"temperature": 0, "max_tokens": 100, "ignore_eos": True, "logprobs": 0}
    usual = distinct_tokens(complete(client, COUNTING, **options).choices)
    changed = distinct_tokens(complete(client, COUNTING, **penalty, **options).choices)

    assert usual < 30, "the usual text repeats few tokens"
    assert (changed - usual) * effect > 0


def distinct_tokens(choices: Iterable[CompletionChoice]) -> int:
    """Return how many different tokens the choices are made of."""
    return len({token for choice in choices for token in tokens_of(choice)})


@pytest.mark.parametrize("narrowing", [{"top_k": 1}, {"top_p": 0}, {"min_p": 1}], ids=str)
def test_narrowest_sampling_is_greedy(client: OpenAI, narrowing: dict[str, float]) -> None:
    options = {"temperature": 1.5, "seed": 3, "max_tokens": LONG.max_tokens}

    assert text(complete(client, LONG.prompt, **narrowing, **options)) == LONG.completion
    assert text(complete(client, LONG.prompt, **options)) != LONG.completion


def sampled(client: OpenAI, **options: Any) -> list[CompletionChoice]:
    """Sample texts at temperature 1.5, with the five likeliest tokens at each position."""
    options = {"temperature": 1.5, "seed": 3, "n": 6, "max_tokens": 40, "logprobs": 5} | options
    return complete(client, OPEN, **options).choices


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


def test_min_p_drops_unlikely_tokens(client: OpenAI) -> None:
    # A token's share is counted after the temperature, which divides distances.
    furthest = 1.5 * -math.log(0.2)

    assert max(distances(sampled(client))) > furthest + TOLERANCE_NATS
    assert max(distances(sampled(client, min_p=0.2))) <= furthest + TOLERANCE_NATS


def test_top_k_keeps_the_likeliest_tokens(client: OpenAI) -> None:
    assert max(ranks(sampled(client))) >= 3
    assert max(ranks(sampled(client, top_k=3))) == 2


def test_top_p_narrows_the_choice(client: OpenAI) -> None:
    wide, narrow = distances(sampled(client)), distances(sampled(client, top_p=0.5))

    assert max(narrow) < max(wide)
    assert sum(narrow) / len(narrow) < sum(wide) / len(wide) / 2


def test_higher_temperature_takes_less_likely_tokens(client: OpenAI) -> None:
    means = []
    for temperature in (0.1, 0.7, 1.5):
        distant = distances(sampled(client, temperature=temperature))
        means.append(sum(distant) / len(distant))

    assert means[0] < means[1] < means[2]
