"""Stop strings end a text before them, wherever they begin and however they are split."""

import pytest
from openai import OpenAI
from openai.types import Completion

from tests.e2e.at_once import at_once
from tests.e2e.completions import (
    complete,
    finish_reasons,
    joined,
    logprobs_of,
    streamed,
    text,
    usage_of,
)
from tests.e2e.examples import COUNTING, LONG

pytestmark = pytest.mark.e2e

OPTIONS = {"temperature": 0, "max_tokens": LONG.max_tokens}
MIDDLE = len(LONG.completion) // 2


def check_stopped(client: OpenAI, stop: str | list[str], *, at: str) -> Completion:
    """Request it whole and streamed: both must end right before the first `at` of the text."""
    expected = LONG.completion[: LONG.completion.index(at)]
    answer, chunks = at_once(
        lambda: complete(client, LONG.prompt, stop=stop, **OPTIONS),
        lambda: streamed(client, LONG.prompt, stop=stop, **OPTIONS),
    )

    assert text(answer) == expected
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_dump()["stop_reason"] == at
    assert joined(chunks) == expected
    assert finish_reasons(chunks) == ["stop"]
    return answer


def test_string_ends_the_text_before_it(client: OpenAI) -> None:
    stop = LONG.completion[MIDDLE : MIDDLE + 9]
    answer, whole = at_once(
        lambda: check_stopped(client, stop, at=stop),
        lambda: complete(client, LONG.prompt, **OPTIONS),
    )

    assert usage_of(answer).completion_tokens < usage_of(whole).completion_tokens


def test_earliest_of_several_strings_counts(client: OpenAI) -> None:
    late, early = LONG.completion[MIDDLE : MIDDLE + 9], LONG.completion[20:29]

    check_stopped(client, [late, "not in the text", early], at=early)


def test_string_across_a_token_boundary_is_found(client: OpenAI) -> None:
    [choice] = complete(client, LONG.prompt, logprobs=0, **OPTIONS).choices
    offsets = logprobs_of(choice).text_offset or []
    boundary = next(
        b for b in offsets[8:] if choice.text.index(choice.text[b - 2 : b + 2]) == b - 2
    )
    assert not {boundary - 2, boundary + 2}.issubset(offsets), "it begins or ends within a token"

    stop = choice.text[boundary - 2 : boundary + 2]
    check_stopped(client, stop, at=stop)


def test_single_character_ends_the_text(client: OpenAI) -> None:
    check_stopped(client, LONG.completion[MIDDLE], at=LONG.completion[MIDDLE])


def test_text_that_only_begins_a_stop_string_is_returned_in_full(client: OpenAI) -> None:
    stop = LONG.completion[-6:] + " and something else"
    answer, chunks = at_once(
        lambda: complete(client, LONG.prompt, stop=stop, **OPTIONS),
        lambda: streamed(client, LONG.prompt, stop=stop, **OPTIONS),
    )

    assert joined(chunks) == LONG.completion
    assert text(answer) == LONG.completion
    assert finish_reasons(chunks) == [LONG.finish_reason]


def test_stop_string_in_the_echoed_prompt_does_not_count(client: OpenAI) -> None:
    options = {"temperature": 0, "max_tokens": 10, "echo": True}
    stop = COUNTING[:4]
    answer, unstopped = at_once(
        lambda: complete(client, COUNTING, stop=stop, **options),
        lambda: complete(client, COUNTING, **options),
    )

    assert stop not in text(answer)[len(COUNTING) :]
    assert text(answer) == text(unstopped)


def test_logprobs_of_a_cut_off_stop_string_stay_within_the_text(client: OpenAI) -> None:
    stop = LONG.completion[MIDDLE : MIDDLE + 9]
    answer = complete(client, LONG.prompt, stop=stop, logprobs=0, **OPTIONS)

    [choice] = answer.choices
    offsets = logprobs_of(choice).text_offset or []
    assert len(offsets) == usage_of(answer).completion_tokens
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(choice.text)


def test_unlimited_tokens_end_at_the_stop_string(client: OpenAI) -> None:
    stop = LONG.completion[MIDDLE : MIDDLE + 9]
    answer = complete(client, LONG.prompt, temperature=0, max_tokens=-1, stop=stop)

    assert text(answer) == LONG.completion[: LONG.completion.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
