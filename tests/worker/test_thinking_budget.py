"""Tokens of reasoning are counted from the tokens alone, however these come."""

from random import Random

import pytest

from worker.engine.thinking_budget import ReasoningCount

START, END = 7, 8


def counted(prompt: list[int], *outputs: list[int]) -> int | None:
    count = ReasoningCount(START, END)
    count.begin(prompt)
    for output in outputs:
        count.read_on(output)
    return count.tokens


def told_by_definition(token_ids: list[int]) -> int | None:
    """Tokens behind the last mark if it begins reasoning."""
    marks = [i for i, token_id in enumerate(token_ids) if token_id in (START, END)]
    if not marks or token_ids[marks[-1]] == END:
        return None
    return len(token_ids) - 1 - marks[-1]


@pytest.mark.parametrize(
    ("prompt", "output", "tokens"),
    [
        ([1], [1, 2], None),
        ([1, START], [], 0),
        ([START, 1], [2], 2),
        ([1], [START, 1, 2, 3], 3),
        ([START], [1, END, 2], None),
        ([START, 1, END], [1, 2], None),
        ([1], [END, 1, START, 2], 1),
        ([1], [START, 1, END, 2, START, 3, 4], 2),
        ([START, 1], [START, 2], 1),
    ],
)
def test_reasoning_is_what_stands_behind_a_mark_that_began_it(
    prompt: list[int], output: list[int], tokens: int | None
) -> None:
    assert counted(prompt, output) == tokens


@pytest.mark.parametrize("seed", range(20))
def test_the_count_is_the_same_behind_any_cut(seed: int) -> None:
    rng = Random(seed)
    prompt, output = ([rng.choice([1, 1, 2, START, END]) for _ in range(20)] for _ in range(2))
    for cut in range(len(output) + 1):
        behind_cut = [output[:length] for length in range(cut, len(output) + 1)]
        assert counted(prompt, *behind_cut) == told_by_definition(prompt + output)
