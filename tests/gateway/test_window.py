"""The context rule, at its edges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.request import ContextLengthBehavior
from gateway.errors import ContextLengthExceededError
from gateway.prompt.window import fit_max_tokens

TRUNCATE, ERROR = ContextLengthBehavior.TRUNCATE, ContextLengthBehavior.ERROR


@pytest.mark.parametrize("behavior", ContextLengthBehavior)
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "expected"),
    [
        (10, 16, 16),
        (10, 90, 90),
        (99, 1, 1),
        (1, 99, 99),
        (10, -1, 90),
        (99, -1, 1),
        (10, 0, 0),
        (99, 0, 0),
    ],
)
def test_what_fits_is_left_as_it_is(
    prompt: int, max_tokens: int, expected: int, behavior: ContextLengthBehavior
) -> None:
    assert fit_max_tokens(prompt, max_tokens, window=100, behavior=behavior) == expected


@pytest.mark.parametrize(("prompt", "max_tokens"), [(10, 91), (99, 2), (50, 10**30)])
def test_truncate_lowers_max_tokens_to_what_fits(prompt: int, max_tokens: int) -> None:
    fitted = fit_max_tokens(prompt, max_tokens, window=100, behavior=TRUNCATE)
    assert fitted == 100 - prompt


@pytest.mark.parametrize(("prompt", "max_tokens"), [(10, 91), (99, 2)])
def test_error_refuses_with_all_counts(prompt: int, max_tokens: int) -> None:
    with pytest.raises(ContextLengthExceededError) as caught:
        fit_max_tokens(prompt, max_tokens, window=100, behavior=ERROR)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "max_tokens")
    for count in (100, prompt, max_tokens, prompt + max_tokens):
        assert str(count) in error.message


@pytest.mark.parametrize("behavior", ContextLengthBehavior)
@pytest.mark.parametrize("max_tokens", [-1, 0, 1, 16])
@pytest.mark.parametrize("prompt", [100, 101, 10**6])
def test_prompt_that_leaves_no_room_is_refused_whatever_is_asked(
    prompt: int, max_tokens: int, behavior: ContextLengthBehavior
) -> None:
    with pytest.raises(ContextLengthExceededError) as caught:
        fit_max_tokens(prompt, max_tokens, window=100, behavior=behavior)
    assert caught.value.param == "prompt"
    assert f"100 tokens, but the prompt has {prompt} tokens" in caught.value.message


@given(
    prompt=st.integers(1, 300),
    max_tokens=st.integers(-1, 400),
    window=st.integers(1, 300),
    behavior=st.sampled_from(ContextLengthBehavior),
)
def test_prompt_and_completion_never_exceed_the_window(
    prompt: int, max_tokens: int, window: int, behavior: ContextLengthBehavior
) -> None:
    try:
        fitted = fit_max_tokens(prompt, max_tokens, window=window, behavior=behavior)
    except ContextLengthExceededError:
        assert prompt + max(max_tokens, 1) > window
        return
    assert fitted >= 0
    assert prompt + fitted <= window
    if max_tokens >= 0:
        assert fitted <= max_tokens
