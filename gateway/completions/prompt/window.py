"""Context window rule: prompt and completion share one window."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.dialects.profile import ContextLengthBehavior
from gateway.dialects.request import FIT
from gateway.records.errors import ContextLengthExceededError

UNLIMITED = -1


class Layout(NamedTuple):
    """A prompt's token ids. Only the body may be cut, at one of its ends."""

    head: Sequence[int]
    body: Sequence[int]
    tail: Sequence[int]

    @property
    def length(self) -> int:
        """The number of token ids."""
        return len(self.head) + len(self.body) + len(self.tail)

    @property
    def token_ids(self) -> Sequence[int]:
        """All token ids in order."""
        is_only = not (self.head or self.tail)
        return self.body if is_only else [*self.head, *self.body, *self.tail]


def tokens_to_keep(length: int, kept: int | None, *, max_tokens: int, window: int) -> int:
    """Return how many of a prompt's tokens are kept.

    If `kept` is None, all tokens are kept. FIT keeps a prompt that fits into the window unchanged.
    For a longer one, it keeps what leaves room for `max_tokens`; -1 reserves room for one token.
    """
    if kept is None:
        return length
    if kept != FIT:
        return min(kept, length)
    if length < window:
        return length
    room = max(1, min(max_tokens, window))
    return max(1, window - room)


def cut(
    layout: Layout, keep: int, *, window: int, keeps_start: bool = False
) -> tuple[Layout, Sequence[int]]:
    """Return the layout with `keep` tokens, and the tokens cut from its body.

    These are the body's first tokens, or its last ones if the prompt `keeps_start`. Raises
    ContextLengthExceededError if the part that must not be cut, which is the suffix and the
    infill tokens, is longer than `keep`.
    """
    surplus = max(0, layout.length - keep)
    if surplus > len(layout.body):
        uncut = layout.length - len(layout.body)
        raise ContextLengthExceededError(
            f"the suffix and the infill tokens are {uncut} tokens, which cannot be truncated, and "
            f"at most {keep} tokens are kept",
            advice="Please reduce the length of 'suffix'.",
            window=window,
            param="suffix",
            requested=str(layout.length),
            n_prompt_tokens=layout.length,
        )
    body = layout.body
    at = len(body) - surplus if keeps_start else surplus
    first, last = body[:at], body[at:]
    kept, lost = (first, last) if keeps_start else (last, first)
    return layout._replace(body=kept), lost


def fit_max_tokens(
    prompt_tokens: int,
    max_tokens: int,
    *,
    window: int,
    behavior: ContextLengthBehavior,
    param: str = "prompt",
    max_tokens_param: str = "max_tokens",
) -> int:
    """Return the maximum number of completion tokens, at most `max_tokens`.

    `max_tokens` -1 means all that fit. A prompt that leaves no room for one token is rejected
    in either behavior: the engine needs that room even to score the prompt. The prompt came in
    `param`, such as `prompt[2]`, and the maximum in `max_tokens_param`. Raises
    ContextLengthExceededError.
    """
    room = window - prompt_tokens
    is_strict = behavior is ContextLengthBehavior.ERROR
    if room < 1 or (max_tokens > room and is_strict):
        raise too_long(
            prompt_tokens,
            max_tokens,
            window=window,
            param=param,
            max_tokens_param=max_tokens_param,
        )
    return room if max_tokens == UNLIMITED else min(max_tokens, room)


def too_long(
    prompt_tokens: int, max_tokens: int, *, window: int, param: str, max_tokens_param: str
) -> ContextLengthExceededError:
    """Return the error for a prompt and a completion that exceed the window together."""
    room = window - prompt_tokens
    if room < 1:
        return prompt_too_long(prompt_tokens, max_tokens, window=window, param=param)
    total, part = prompt_tokens + max_tokens, _part(param)
    return ContextLengthExceededError(
        f"you requested {total} tokens ({prompt_tokens} in the {part}, {max_tokens} in the "
        "completion)",
        advice=f"Please reduce the length of the {part} or completion. '{max_tokens_param}' must "
        f"be at most {room} for '{param}'. Given: {max_tokens}. To lower it, set "
        "'context_length_exceeded_behavior' to truncate.",
        window=window,
        param=max_tokens_param,
        requested=str(total),
        n_prompt_tokens=prompt_tokens,
    )


def prompt_too_long(
    prompt_tokens: int, max_tokens: int, *, window: int, param: str, is_least: bool = False
) -> ContextLengthExceededError:
    """Return the error for a prompt that leaves no room for one token.

    `is_least`: whether the prompt has at least `prompt_tokens`, because it was not encoded wholly.
    """
    least, part = "at least " if is_least else "", _part(param)
    completion = max(1, max_tokens)
    return ContextLengthExceededError(
        f"you requested {least}{prompt_tokens + completion} tokens ({least}{prompt_tokens} in the "
        f"{part}, {completion} in the completion)",
        advice=f"Please reduce the length of the {part} or completion. '{param}' must have at most "
        f"{window - 1} tokens. Given: {least}{prompt_tokens}.",
        window=window,
        param=part,
        requested=f"{least}{prompt_tokens}",
        n_prompt_tokens=None if is_least else prompt_tokens,
    )


def _part(param: str) -> str:
    """Return the parameter without an index, which is also how clients' patterns call it."""
    return param.partition("[")[0]
