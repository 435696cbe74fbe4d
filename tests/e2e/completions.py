"""Completions with the official client, and readers of their responses."""

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from openai import AsyncOpenAI, OpenAI, Stream
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.completion_choice import Logprobs

from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import wait_until
from tests.support.stack import MODEL

A = TypeVar("A")

EXTENSIONS = frozenset(
    {"context_length_exceeded_behavior", "ignore_eos", "min_p", "repetition_penalty", "top_k"}
)
"""Parameters that the official client lacks: they go into `extra_body`."""


def parameters(prompt: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the client's `completions.create`."""
    known = {name: value for name, value in options.items() if name not in EXTENSIONS}
    extra = {name: value for name, value in options.items() if name in EXTENSIONS}
    return {"model": MODEL, "prompt": prompt, "extra_body": extra, **known}


def complete(client: OpenAI, prompt: Any, **options: Any) -> Completion:
    """Return a whole response."""
    return cast("Completion", client.completions.create(**parameters(prompt, options)))


def streamed(client: OpenAI, prompt: Any, **options: Any) -> list[Completion]:
    """Return the chunks of a streamed response, once all of them have arrived."""
    options |= {"stream": True}
    answer: Any = client.completions.create(**parameters(prompt, options))
    with cast("Stream[Completion]", answer) as stream:
        return list(stream)


async def complete_async(client: AsyncOpenAI, prompt: Any, **options: Any) -> Completion:
    """Return a whole response."""
    return cast("Completion", await client.completions.create(**parameters(prompt, options)))


async def streamed_async(client: AsyncOpenAI, prompt: Any, **options: Any) -> list[Completion]:
    """Return the chunks of a streamed response, once all of them have arrived."""
    options |= {"stream": True}
    stream: Any = await client.completions.create(**parameters(prompt, options))
    async with stream:
        return [chunk async for chunk in stream]


def in_pieces(ask: Callable[[], A], *, pieces: Callable[[A], int], least: int = 2) -> A:
    """Repeat a request until it has so many chunks: a stalled gateway merges tokens."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while pieces(answer := ask()) < least:
        assert time.monotonic() < deadline, answer
    return answer


def wait_until_served(client: OpenAI, model: str, *, is_served: bool = True) -> None:
    """Wait until the gateway lists a model as served, or as not served; it may take a second."""

    def is_ready() -> bool | None:
        # A model that is still loading is listed too.
        listed: dict[str, bool] = {
            each.id: each.model_dump()["ready"] for each in client.models.list()
        }
        return listed.get(model)

    wait_until(
        lambda: is_ready() is is_served,
        what=f"{model} being {'' if is_served else 'un'}served",
    )


def text(completion: Completion) -> str:
    """Return the text of a response with one choice."""
    [choice] = completion.choices
    return choice.text


def texts(completion: Completion) -> list[str]:
    """Return the texts of all choices, by index."""
    assert [choice.index for choice in completion.choices] == list(range(len(completion.choices)))
    return [choice.text for choice in completion.choices]


def choices_of(chunks: Iterable[Completion], index: int = 0) -> list[CompletionChoice]:
    """Return the chunks of one choice, in order."""
    return [choice for chunk in chunks for choice in chunk.choices if choice.index == index]


def joined(chunks: Iterable[Completion], index: int = 0) -> str:
    """Return the text of one streamed choice."""
    return "".join(choice.text for choice in choices_of(chunks, index))


def finish_reasons(chunks: Iterable[Completion], index: int = 0) -> list[str]:
    """Return every finish reason that was sent for one choice: there must be only one."""
    # The client's type has no None, but chunks before the last one have it.
    reasons: list[Any] = [choice.finish_reason for choice in choices_of(chunks, index)]
    return [reason for reason in reasons if reason is not None]


def usage_of(completion: Completion) -> CompletionUsage:
    """Return the token counts, which must be present and add up."""
    usage = completion.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return usage


def cached_tokens(completion: Completion) -> int:
    """Return the prompt tokens that were in the prefix cache."""
    details = usage_of(completion).prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None
    return details.cached_tokens


def logprobs_of(choice: CompletionChoice) -> Logprobs:
    """Return the log-probabilities of a choice, whose four lists must be of one length."""
    logprobs = choice.logprobs
    assert logprobs is not None
    lengths = {len(values or []) for values in logprobs.model_dump().values()}
    assert len(lengths) == 1, lengths
    return logprobs


def tokens_of(choice: CompletionChoice) -> list[str]:
    """Return the texts of a choice's tokens."""
    return logprobs_of(choice).tokens or []


def values_of(choice: CompletionChoice) -> list[float]:
    """Return the log-probabilities of a choice's tokens, all of which must have one."""
    values: list[Any] = list(logprobs_of(choice).token_logprobs or [])
    assert None not in values
    return values
