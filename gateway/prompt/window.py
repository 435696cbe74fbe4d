"""Context window rule: prompt and completion share one window."""

from typing import NamedTuple

from gateway.dialects.profile import ContextLengthBehavior
from gateway.dialects.request import FIT
from gateway.errors import ContextLengthExceededError

UNLIMITED = -1


class Layout(NamedTuple):
    """A prompt's token ids. Only the body may be cut, from its start."""

    head: list[int]
    body: list[int]
    tail: list[int]

    @property
    def length(self) -> int:
        """The number of token ids."""
        return len(self.head) + len(self.body) + len(self.tail)

    @property
    def token_ids(self) -> list[int]:
        """All token ids in order."""
        return [*self.head, *self.body, *self.tail]


def tokens_to_keep(length: int, kept: int | None, *, max_tokens: int, window: int) -> int:
    """Return how many of a prompt's last tokens are kept.

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


def cut(layout: Layout, keep: int, *, window: int, name: str = "the prompt") -> Layout:
    """Return the layout without the first tokens of its body, so that `keep` tokens remain.

    Raises ContextLengthExceededError if the part that must not be cut is longer than `keep`.
    """
    surplus = max(0, layout.length - keep)
    if surplus > len(layout.body):
        raise ContextLengthExceededError(
            f"This model's context window is {window} tokens. The part of {name} that cannot be "
            f"truncated has {layout.length - len(layout.body)} tokens, but at most {keep} are "
            "kept.",
            param="prompt",
            n_prompt_tokens=layout.length,
            n_ctx=window,
        )
    return layout._replace(body=layout.body[surplus:])


def fit_max_tokens(
    prompt_tokens: int,
    max_tokens: int,
    *,
    window: int,
    behavior: ContextLengthBehavior,
    name: str = "the prompt",
    param: str = "prompt",
) -> int:
    """Return the maximum number of completion tokens, at most `max_tokens`.

    `max_tokens` -1 means all that fit. A prompt that leaves no room for one token is rejected
    in either behavior: the engine needs that room even to score the prompt. Errors call the
    prompt `name`; it came in `param`. Raises ContextLengthExceededError.
    """
    room = window - prompt_tokens
    if room < 1:
        raise ContextLengthExceededError(
            f"This model's context window is {window} tokens, but {name} has {prompt_tokens} "
            "tokens.",
            param=param,
            n_prompt_tokens=prompt_tokens,
            n_ctx=window,
        )
    if max_tokens == UNLIMITED:
        return room
    if max_tokens > room and behavior is ContextLengthBehavior.ERROR:
        raise ContextLengthExceededError(
            f"This model's context window is {window} tokens, but {name} has {prompt_tokens} "
            f"tokens and 'max_tokens' is {max_tokens}, {prompt_tokens + max_tokens} in total. "
            "Shorten the prompt, reduce 'max_tokens', or set 'context_length_exceeded_behavior' "
            "to truncate.",
            param="max_tokens",
            n_prompt_tokens=prompt_tokens,
            n_ctx=window,
        )
    return min(max_tokens, room)
