"""The context rule: prompt and completion share one window."""

from gateway.dialects.request import ContextLengthBehavior
from gateway.errors import ContextLengthExceededError

UNLIMITED = -1


def fit_max_tokens(
    prompt_tokens: int, max_tokens: int, *, window: int, behavior: ContextLengthBehavior
) -> int:
    """Return the completion tokens that may be generated, at most `max_tokens`.

    `max_tokens` -1 means all that fit. A prompt that leaves no room for one token is refused whatever
    the behavior: the engine needs that room even to score the prompt. Raises ContextLengthExceededError.
    """
    room = window - prompt_tokens
    if room < 1:
        raise ContextLengthExceededError(
            f"This model's context window is {window} tokens, but the prompt has {prompt_tokens} tokens.",
            param="prompt",
        )
    if max_tokens == UNLIMITED:
        return room
    if max_tokens > room and behavior is ContextLengthBehavior.ERROR:
        raise ContextLengthExceededError(
            f"This model's context window is {window} tokens. The prompt has {prompt_tokens} tokens and "
            f"max_tokens is {max_tokens}: {prompt_tokens + max_tokens} together. Shorten the prompt, lower "
            "max_tokens, or set context_length_exceeded_behavior to 'truncate'.",
            param="max_tokens",
        )
    return min(max_tokens, room)
