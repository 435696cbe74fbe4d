"""Requests and replies made by hand, for the tests of rendering."""

from collections.abc import Sequence
from typing import Any

from contract.dialect import Dialect
from contract.messages import (
    CallPiece,
    Delta,
    JobFailed,
    JobFinished,
    JobStarted,
    PromptScored,
    TokenLogprob,
    encode_logprobs,
)
from contract.outcomes import FailureCode, FinishReason
from contract.prompts import packed
from contract.sampling import SamplingSpec
from gateway.completions.queue.generation import Generation, Reply
from gateway.completions.rendering.completion import Completion
from gateway.dialects.profile import PROFILES, ContextLengthBehavior
from gateway.dialects.request import GenerationRequest

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def completion(
    *,
    prompts: int = 1,
    dialect: Dialect = Dialect.OPENAI,
    prompt_texts: list[str] | None = None,
    prompt_token_ids: list[list[int]] | None = None,
    started_at: float = 0.0,
    **fields: Any,
) -> Completion:
    """Make the fixed part of a response, which echoes `prompt_texts`; `chat` is of a chat."""
    request: dict[str, Any] = {
        "profile": PROFILES[dialect],
        "model": "m",
        "prompts": ["p"] * prompts,
        "images": [[]] * prompts,
        "image_params": [[]] * prompts,
        "max_tokens": 16,
        "context_length_behavior": ContextLengthBehavior.TRUNCATE,
        "n": 1,
        "best_of": fields.get("n", 1),
        "stop": [],
        "includes_stop": False,
        "logprobs": None,
        "echo": prompt_texts is not None,
        "stream": True,
        "include_usage": False,
        "sampling": SamplingSpec(seed=1),
        "ignored_parameters": (),
    }
    return Completion(
        id="cmpl-1" if fields.get("chat") is None else "chatcmpl-1",
        model="m",
        created=1_700_000_000,
        fingerprint="fp_1",
        request=GenerationRequest(**(request | fields)),
        prompt_token_ids=[packed(each) for each in prompt_token_ids or [[5, 6, 7]] * prompts],
        prompt_texts=prompt_texts if prompt_texts is not None else [""] * prompts,
        started_at=started_at,
    )


def said(
    text: str,
    *,
    prompt: int = 0,
    choice: int = 0,
    finish: FinishReason | None = None,
    stop_reason: int | str | None = None,
    logprobs: list[TokenLogprob] | None = None,
    token_ids: Sequence[int] = (9,),
    reasoning: str = "",
    reasoning_tokens: int = 0,
    calls: Sequence[CallPiece] = (),
) -> Reply:
    """Make a delta as the dispatcher gives it."""
    delta = Delta(
        1,
        1,
        choice,
        0,
        text,
        list(token_ids),
        finish,
        stop_reason,
        encode_logprobs(logprobs or []),
        reasoning=reasoning,
        calls=list(calls),
        reasoning_tokens=reasoning_tokens,
    )
    return Reply(prompt, delta)


def begun(exactness_class: str) -> Reply:
    """Make the start of a job on an engine of this class."""
    return Reply(0, JobStarted(1, 1, 3, 0, exactness_class))


def scored(logprobs: list[TokenLogprob], *, prompt: int = 0) -> Reply:
    """Make the log-probabilities of a prompt."""
    return Reply(
        prompt, PromptScored(1, 1, [encode_logprobs(logprobs[:2]), encode_logprobs(logprobs[2:])])
    )


def ended(
    *,
    prompt: int = 0,
    prompt_tokens: int = 3,
    tokens: int = 2,
    cached: int = 0,
    prefill_ms: float = 0.0,
    generation_ms: float = 0.0,
    ended_at: int = 1_700_000_001,
) -> Reply:
    """Make the end of a job."""
    finished = JobFinished(
        1, 1, prompt_tokens, tokens, cached, prefill_ms, generation_ms, ended_at=ended_at
    )
    return Reply(prompt, finished)


def failed(code: FailureCode = FailureCode.ENGINE_ERROR, *, prompt: int = 0) -> Reply:
    """Make the failure of a job."""
    return Reply(prompt, JobFailed(1, 1, code, ""))


def inbox(*replies: Reply) -> Generation:
    """Put replies into an inbox."""
    generation = Generation(max_unread_bytes=1 << 20)
    for prompt_index, message in replies:
        generation.push(prompt_index, message)
    return generation
