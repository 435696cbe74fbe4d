"""Choices: how many a request returns, and the log-probabilities in the response."""

from typing import Annotated, Any

from contract.messages import Ranking
from contract.sampling import LOGPROBS, N, Range
from gateway.dialects.fields import COUNT, Parameters, agreed, bounded, integer, typed, within
from gateway.dialects.profile import Profile
from gateway.dialects.wire import INTEGRAL
from gateway.records.errors import invalid, must


class SharedChoiceParameters(Parameters):
    """Parameters that completions and chats share."""

    n: Annotated[int, bounded(N), INTEGRAL] | None = None
    """Choices for each prompt. Default: 1."""
    n_cmpl: Annotated[int, bounded(N), INTEGRAL] | None = None
    """Another name of `n`."""
    return_token_ids: bool | None = None
    """Return the ids of prompt and completion tokens. Default: false."""
    return_tokens: bool | None = None
    """Another name of `return_token_ids`."""
    prompt_logprobs: Annotated[int, bounded(LOGPROBS), INTEGRAL] | None = None
    """Return log-probabilities of the prompt's tokens and of this many likeliest tokens at their
    places, with token ids and ranks. Must be 0 in a stream. -1, which is the whole vocabulary in
    vLLM, is not supported. Default: none."""
    return_tokens_as_token_ids: bool | None = None
    """Whether `logprobs` call tokens `token_id:N`, and not by their texts. Default: false."""
    skip_special_tokens: bool | None = None
    """Whether to omit special tokens from the text; end-of-text and stop tokens are always omitted.
    Default: true."""
    logprobs: Annotated[Any, typed(f"int[{LOGPROBS.minimum}:{LOGPROBS.maximum}] | bool | None")] = (
        None
    )
    """Return log-probabilities of the sampled tokens and of this many likeliest tokens; true means
    1, in chats 0. At most 5 in dialects openai (chats: 20) and fireworks, 20 in others."""
    top_logprobs: Annotated[int, bounded(LOGPROBS), INTEGRAL] | None = None
    """The number of likeliest tokens if `logprobs` is true. Default: 1, in chats 0."""
    n_probs: Annotated[int, bounded(COUNT), INTEGRAL] | None = None
    """Another name of `top_logprobs` that does not require `logprobs`; 0 returns none."""


class ChoiceParameters(SharedChoiceParameters):
    """The number of choices, and the details about their tokens."""

    best_of: Annotated[int, bounded(N), INTEGRAL] | None = None
    """Sample this many sequences (at least `n`) and return the `n` with the highest mean
    log-probability; all are billed. Cannot be streamed if larger than `n`. In dialect mistralrs:
    sample `n` and return this many (at most `n`), the likeliest first. Default: n."""


def read_fan_out(
    body: ChoiceParameters, profile: Profile, *, is_streamed: bool
) -> tuple[int, int, Ranking]:
    """Return the numbers of returned choices and of sampled sequences, and their ranking.

    Raises InvalidParameterError.
    """
    n = agreed(n=body.n, n_cmpl=body.n_cmpl) or 1
    kept, sampled, ranking = n, n, Ranking.MEAN
    if body.best_of is not None and profile.best_of_keeps:
        if body.best_of > n:
            raise must("best_of", f"be at most n ({n}) in this dialect", body.best_of)
        kept, ranking = body.best_of, Ranking.MEAN if is_streamed else Ranking.SUM
    elif body.best_of is not None:
        if body.best_of < n:
            raise must("best_of", f"be at least n ({n})", body.best_of)
        sampled = body.best_of
    if is_streamed and sampled > kept:
        raise must("best_of", f"equal n ({n}) if 'stream' is true", body.best_of)
    return kept, sampled, ranking


def read_logprobs(body: SharedChoiceParameters, *, by_default: int, most: int) -> int | None:
    """Return the number of alternatives per token, or None for no log-probabilities.

    `by_default` is the number if only `logprobs` true is given, and `most` the largest. Raises
    InvalidParameterError.
    """
    is_on, count = _read_logprobs(body.logprobs)
    if body.top_logprobs and not (is_on or body.n_probs):
        raise invalid("top_logprobs", f"requires 'logprobs' true. Given: {body.top_logprobs}.")
    given = {
        "logprobs": count,
        "top_logprobs": body.top_logprobs if is_on or body.n_probs else None,
        "n_probs": body.n_probs or None,
    }
    name = next((name for name, value in given.items() if value is not None), "logprobs")
    count = agreed(**given)
    if count is not None:
        return within(count, name, Range(0, most))
    return by_default if is_on else None


def _read_logprobs(value: object) -> tuple[bool, int | None]:
    """Return whether log-probabilities are requested, and how many if a number specifies it."""
    if value is None or isinstance(value, bool):
        return bool(value), None
    count = integer(value)
    if count is None:
        raise must("logprobs", "be an integer or a boolean", value)
    return True, count


def read_prompt_logprobs(body: SharedChoiceParameters, *, is_streamed: bool) -> int | None:
    """Return the number of alternatives per token of the prompt, or None for none.

    Raises InvalidParameterError.
    """
    count = body.prompt_logprobs
    if count and is_streamed:
        raise must("prompt_logprobs", "be 0 if 'stream' is true", count)
    return count


def read_chat_n(body: SharedChoiceParameters, *, most: int) -> int:
    """Return the number of choices, at most `most`. Raises InvalidParameterError."""
    n = agreed(n=body.n, n_cmpl=body.n_cmpl) or 1
    if n > most:
        raise must("n", f"be at most {most}", n)
    return n
