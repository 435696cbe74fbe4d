"""Token counts: those of the model's tokenizer and of the generated text, whole and streamed."""

import pytest
from openai import OpenAI
from openai.types import Completion

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.completions import cached_tokens, complete, streamed, tokens_of, usage_of
from tests.e2e.examples import EXAMPLES, LONG, OPEN, Example, ids_of
from tests.support.stack import Stack

pytestmark = pytest.mark.e2e

BLOCK_TOKENS = 128
"""Block size of vLLM's prefix cache on a CPU."""

PROMPT_CHARACTERS = 2_000


@each_at_once("example", EXAMPLES[::4])
def test_counts_are_those_of_tokenizer_and_engine(client: OpenAI, example: Example) -> None:
    answer = complete(
        client, example.prompt, temperature=0, max_tokens=example.max_tokens, logprobs=0
    )

    usage = usage_of(answer)
    assert usage.prompt_tokens == len(ids_of(example.prompt))
    assert usage.completion_tokens == len(tokens_of(answer.choices[0]))
    assert (usage.completion_tokens == example.max_tokens) or example.finish_reason == "stop"


def test_counts_sum_over_prompts_and_choices(client: OpenAI) -> None:
    answer = complete(
        client, [OPEN, LONG.prompt], temperature=1, seed=6, n=3, max_tokens=20, logprobs=0
    )

    usage = usage_of(answer)
    assert usage.prompt_tokens == len(ids_of(OPEN)) + len(ids_of(LONG.prompt))
    assert usage.completion_tokens == sum(len(tokens_of(choice)) for choice in answer.choices)


def test_usage_is_in_the_final_chunk(client: OpenAI) -> None:
    options = {"temperature": 1, "seed": 6, "n": 2, "max_tokens": 20}
    plain, (*chunks, last) = at_once(
        lambda: complete(client, OPEN, **options), lambda: streamed(client, OPEN, **options)
    )

    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert counts(last) == counts(plain)
    assert last.choices[0].finish_reason == plain.choices[last.choices[0].index].finish_reason


def test_include_usage_adds_a_chunk_without_choices(client: OpenAI) -> None:
    options = {"temperature": 1, "seed": 6, "max_tokens": 20}
    plain, (*chunks, extra) = at_once(
        lambda: complete(client, OPEN, **options),
        lambda: streamed(client, OPEN, stream_options={"include_usage": True}, **options),
    )

    assert extra.choices == []
    assert counts(extra) == counts(plain)
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_continuous_usage_counts_the_tokens_so_far(client: OpenAI) -> None:
    options = {"temperature": 1, "seed": 6, "max_tokens": 20}
    continuous, without = at_once(
        lambda: streamed(
            client,
            OPEN,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            **options,
        ),
        lambda: streamed(client, OPEN, stream_options={"include_usage": False}, **options),
    )

    *chunks, extra = continuous
    reported = [counts(chunk) for chunk in chunks]
    assert reported == sorted(reported)
    assert reported[-1] == counts(extra)
    assert reported[0] < reported[-1]
    assert not any(chunk.usage for chunk in without)


def counts(completion: Completion) -> tuple[int, int]:
    """Return the token counts that do not depend on the prefix cache."""
    usage = usage_of(completion)
    return usage.prompt_tokens, usage.completion_tokens


def test_prefix_cache_serves_the_same_tenant_only(stack: Stack, client: OpenAI) -> None:
    prompt = " ".join(f"Line {number} of a text." for number in range(PROMPT_CHARACTERS // 20))
    owner = client.with_options(api_key=stack.key("prefix-owner"))
    same = client.with_options(
        api_key=stack.key("prefix-owner", scopes=("completions",)),
        base_url=f"{stack.gateways[1]}/v1",
    )
    other = client.with_options(api_key=stack.key("prefix-stranger"))
    options = {"temperature": 0, "max_tokens": 4}
    first = complete(owner, prompt, **options)
    second = complete(owner, prompt, **options)
    by_other_key = complete(same, prompt, **options)
    strange = complete(other, prompt, **options)

    whole_blocks = len(ids_of(prompt)) // BLOCK_TOKENS * BLOCK_TOKENS
    assert whole_blocks > BLOCK_TOKENS
    assert cached_tokens(first) == 0
    assert cached_tokens(second) == whole_blocks
    assert cached_tokens(by_other_key) == whole_blocks, "a key of the same tenant, another gateway"
    assert cached_tokens(strange) == 0
    assert second.choices[0].text == first.choices[0].text == strange.choices[0].text


def test_choices_of_one_prompt_do_not_count_as_cached(stack: Stack, client: OpenAI) -> None:
    prompt = " ".join(f"Row {number} of a table." for number in range(PROMPT_CHARACTERS // 20))
    fresh = client.with_options(api_key=stack.key("prefix-choices"))

    assert cached_tokens(complete(fresh, prompt, n=4, seed=1, max_tokens=4)) == 0
