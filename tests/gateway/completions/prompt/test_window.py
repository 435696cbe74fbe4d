"""The context window rule, at its bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.completions.prompt.window import Layout, cut, fit_max_tokens, tokens_to_keep
from gateway.dialects.profile import ContextLengthBehavior
from gateway.dialects.request import FIT
from gateway.records.errors import ContextLengthExceededError
from tests.support.cases import all_cases

TRUNCATE, ERROR = ContextLengthBehavior.TRUNCATE, ContextLengthBehavior.ERROR


@all_cases("behavior", ContextLengthBehavior)
@all_cases(
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
def test_request_that_fits_is_unchanged(
    prompt: int, max_tokens: int, expected: int, behavior: ContextLengthBehavior
) -> None:
    assert fit_max_tokens(prompt, max_tokens, window=100, behavior=behavior) == expected


@all_cases(("prompt", "max_tokens"), [(10, 91), (99, 2), (50, 10**30)])
def test_truncate_lowers_max_tokens_to_what_fits(prompt: int, max_tokens: int) -> None:
    fitted = fit_max_tokens(prompt, max_tokens, window=100, behavior=TRUNCATE)
    assert fitted == 100 - prompt


@all_cases(("prompt", "max_tokens"), [(10, 91), (99, 2)])
def test_error_refuses_with_all_counts(prompt: int, max_tokens: int) -> None:
    with pytest.raises(ContextLengthExceededError) as caught:
        fit_max_tokens(prompt, max_tokens, window=100, behavior=ERROR)
    error = caught.value
    assert (error.n_prompt_tokens, error.n_ctx) == (prompt, 100)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "max_tokens")
    for count in (100, prompt, max_tokens, prompt + max_tokens):
        assert str(count) in error.message


@all_cases("behavior", ContextLengthBehavior)
@all_cases("max_tokens", [-1, 0, 1, 16])
@all_cases("prompt", [100, 101, 10**6])
def test_prompt_that_leaves_no_room_is_always_refused(
    prompt: int, max_tokens: int, behavior: ContextLengthBehavior
) -> None:
    with pytest.raises(ContextLengthExceededError) as caught:
        fit_max_tokens(prompt, max_tokens, window=100, behavior=behavior)
    assert caught.value.param == "prompt"
    assert (caught.value.n_prompt_tokens, caught.value.n_ctx) == (prompt, 100)
    completion = max(max_tokens, 1)
    assert caught.value.message == (
        f"This model's maximum context length is 100 tokens. However, you requested "
        f"{prompt + completion} tokens ({prompt} in the prompt, {completion} in the completion). "
        "Please reduce the length of the prompt or completion. 'prompt' must have at most 99 "
        f"tokens. Given: {prompt}."
    )


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


def test_errors_call_the_prompt_by_its_name() -> None:
    with pytest.raises(ContextLengthExceededError, match=r"'prompt\[3\]' must have at most") as e:
        fit_max_tokens(100, 1, window=100, behavior=ERROR, param="prompt[3]")
    assert e.value.param == "prompt"
    with pytest.raises(ContextLengthExceededError) as e:
        fit_max_tokens(99, 2, window=100, behavior=ERROR, param="messages")
    assert e.value.message == (
        "This model's maximum context length is 100 tokens. However, you requested 101 tokens (99 "
        "in the messages, 2 in the completion). Please reduce the length of the messages or "
        "completion. 'max_tokens' must be at most 1 for 'messages'. Given: 2. To lower it, set "
        "'context_length_exceeded_behavior' to truncate."
    )
    assert e.value.llamacpp_message.startswith(
        "request (101 tokens) exceeds the available context size (100 tokens), try increasing it"
    )


@given(
    length=st.integers(1, 300),
    max_tokens=st.integers(-1, 400),
    window=st.integers(2, 300),
    kept=st.one_of(st.none(), st.just(FIT), st.integers(1, 400)),
)
def test_number_of_kept_tokens_is_in_range(
    length: int, max_tokens: int, window: int, kept: int | None
) -> None:
    keep = tokens_to_keep(length, kept, max_tokens=max_tokens, window=window)
    assert 1 <= keep <= length
    if kept == FIT:
        assert keep < window
        # A prompt that fits is left alone, and one that is cut leaves room for max_tokens.
        assert keep == (
            length if length < window else max(1, window - max(1, min(max_tokens, window)))
        )


def test_only_the_body_is_cut() -> None:
    layout = Layout([1, 2], [3, 4, 5], [6])
    assert cut(layout, 6, window=10) == (layout, [])
    for keep, keeps_start, kept, removed in (
        (4, False, [1, 2, 5, 6], [3, 4]),
        (3, False, [1, 2, 6], [3, 4, 5]),
        (4, True, [1, 2, 3, 6], [4, 5]),
        (3, True, [1, 2, 6], [3, 4, 5]),
    ):
        rest, lost = cut(layout, keep, window=10, keeps_start=keeps_start)
        assert (rest.token_ids, lost) == (kept, removed)
    with pytest.raises(
        ContextLengthExceededError, match=r"are 3 tokens, which .* at most 2"
    ) as caught:
        cut(layout, 2, window=10)
    assert (caught.value.n_prompt_tokens, caught.value.n_ctx) == (6, 10)
