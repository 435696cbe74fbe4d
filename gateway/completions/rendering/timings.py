"""Timings of a response: one record, rendered in the format of each dialect (docs/api.md)."""

from time import monotonic
from typing import Any, NamedTuple

import msgspec

from contract.messages import JobFinished, JobStarted
from gateway.completions.rendering.completion import Completion, Usage
from gateway.dialects.profile import TimingShape
from gateway.dialects.request import GenerationRequest

MILLISECONDS = 1000.0


class Timings(msgspec.Struct, kw_only=True):
    """Tokens and times of a request. Over several prompts, tokens are sums and times are maxima."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_ms: float = 0.0
    """From the request to the claim of its job by a worker."""
    prefill_ms: float = 0.0
    """From the claim to the first token."""
    generation_ms: float = 0.0
    """From the first token to the last."""
    time_to_first_token_ms: float = 0.0
    total_ms: float = 0.0


class Stopwatch:
    """Measures the times of one request, for each job when its end is received.

    The worker measures prefill and generation, the gateway the total. The rest is the queue time.
    Like the time to first token, it includes the transfer of replies, about a millisecond.
    """

    __slots__ = ("_started_at", "_times", "ended_at")

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._times = Timings()
        self.ended_at = 0
        """Unix time in seconds of the last end, the same in each replay; 0 if none has ended."""

    def elapsed_ms(self) -> float:
        """Return the milliseconds since the start."""
        return (monotonic() - self._started_at) * MILLISECONDS

    def add(self, finished: JobFinished) -> None:
        """Record a job that has just finished, or finished earlier if its response is replayed."""
        total_ms = max(self.elapsed_ms(), finished.prefill_ms + finished.generation_ms)
        ttft_ms = max(total_ms - finished.generation_ms, 0.0)
        self.ended_at = max(self.ended_at, finished.ended_at)
        times = self._times
        times.total_ms = max(times.total_ms, total_ms)
        times.time_to_first_token_ms = max(times.time_to_first_token_ms, ttft_ms)
        times.queue_ms = max(times.queue_ms, ttft_ms - finished.prefill_ms)
        times.prefill_ms = max(times.prefill_ms, finished.prefill_ms)
        times.generation_ms = max(times.generation_ms, finished.generation_ms)

    def timings(self, usage: Usage) -> Timings:
        """Return the timings of all recorded jobs."""
        return msgspec.structs.replace(
            self._times,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )


class RunningTimings:
    """llama.cpp's `timings` of a stream that is still running (`timings_per_token`).

    Values measured by the worker come with the final chunk. Until then, `cache_n` is absent and
    `prompt_ms` includes the queue time.
    """

    __slots__ = ("_completion", "_first_ms", "_stopwatch", "_tokens")

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._stopwatch = Stopwatch(completion.started_at)
        self._first_ms: float | None = None
        self._tokens = 0

    def add(self, tokens: int) -> dict[str, Any]:
        """Count tokens that just arrived and return the `timings` up to them."""
        elapsed_ms = self._stopwatch.elapsed_ms()
        if self._first_ms is None:
            self._first_ms = elapsed_ms
        self._tokens += tokens
        timings = Timings(
            prompt_tokens=sum(map(len, self._completion.prompt_token_ids)),
            completion_tokens=self._tokens,
            prefill_ms=self._first_ms,
            generation_ms=elapsed_ms - self._first_ms,
        )
        body = _llamacpp(timings)
        del body["cache_n"]
        return body


def job_timings(finished: JobFinished, *, completion_tokens: int) -> dict[str, Any]:
    """Return llama.cpp's `timings` of one job, as the worker measured them."""
    return _llamacpp(
        Timings(
            prompt_tokens=finished.prompt_tokens,
            cached_tokens=finished.cached_tokens,
            completion_tokens=completion_tokens,
            prefill_ms=finished.prefill_ms,
            generation_ms=finished.generation_ms,
        )
    )


def prompt_progress(started: JobStarted, elapsed_ms: float) -> list[dict[str, Any]]:
    """Return llama.cpp's `prompt_progress` of a prompt: at its beginning and at its end.

    The engine reports a prompt only when it has processed all of it, so both are known at once.
    """
    progress = {"total": started.prompt_tokens, "cache": started.cached_tokens}
    return [
        {**progress, "processed": started.cached_tokens, "time_ms": 0},
        {**progress, "processed": started.prompt_tokens, "time_ms": round(elapsed_ms)},
    ]


class ShownTimings(NamedTuple):
    """The parts of a response that contain timings, each empty without them."""

    in_usage: dict[str, Any]
    beside_usage: dict[str, Any]
    """Members of a whole body or of a stream's final chunk."""
    headers: dict[str, str]
    """Headers of a response that is not streamed."""


def shown_timings(stopwatch: Stopwatch, usage: Usage, request: GenerationRequest) -> ShownTimings:
    """Return the timings of a finished request as its dialect shows them."""
    shape = request.profile.timing
    is_on_request = shape in (TimingShape.NONE, TimingShape.VLLM)
    if is_on_request and not (request.wants_timings or request.timings_per_token):
        return ShownTimings({}, {}, {})
    timings = stopwatch.timings(usage)
    in_usage = {}
    if shape is TimingShape.OMLX:
        in_usage = _omlx(timings)
    elif shape is TimingShape.MISTRALRS:
        in_usage = _mistralrs(timings)
    return ShownTimings(
        in_usage, _timing_members(timings, request), _timing_headers(timings, shape)
    )


def _timing_members(timings: Timings, request: GenerationRequest) -> dict[str, Any]:
    shape = request.profile.timing
    members: dict[str, Any] = {}
    if shape is TimingShape.LLAMACPP or request.timings_per_token:
        members["timings"] = _llamacpp(timings)
    if request.wants_timings and shape is not TimingShape.VLLM:
        members["perf_metrics"] = _fireworks(timings)
    # vLLM has no metrics for several sequences.
    elif request.wants_timings and len(request.prompts) == request.n == 1:
        members["metrics"] = _vllm(timings)
    return members


def _timing_headers(timings: Timings, shape: TimingShape) -> dict[str, str]:
    if shape is not TimingShape.FIREWORKS:
        return {}
    return {
        f"fireworks-{name}": str(value) if isinstance(value, int) else f"{value:.6f}"
        for name, value in _fireworks(timings).items()
    }


def _fireworks(timings: Timings) -> dict[str, Any]:
    """Durations in seconds."""
    return {
        "prompt-tokens": timings.prompt_tokens,
        "cached-prompt-tokens": timings.cached_tokens,
        "server-time-to-first-token": _seconds(timings.time_to_first_token_ms),
        "server-processing-time": _seconds(timings.total_ms),
        "prefill-queue-duration": _seconds(timings.queue_ms),
        "prefill-duration": _seconds(timings.prefill_ms),
        "generation-duration": _seconds(timings.generation_ms),
    }


def _llamacpp(timings: Timings) -> dict[str, Any]:
    """Durations in milliseconds; `prompt_n` excludes cached tokens."""
    prompt_tokens = timings.prompt_tokens - timings.cached_tokens
    return {
        "cache_n": timings.cached_tokens,
        "prompt_n": prompt_tokens,
        "prompt_ms": _rounded(timings.prefill_ms),
        "prompt_per_token_ms": _share(timings.prefill_ms, prompt_tokens),
        "prompt_per_second": _per_second(prompt_tokens, timings.prefill_ms),
        "predicted_n": timings.completion_tokens,
        "predicted_ms": _rounded(timings.generation_ms),
        "predicted_per_token_ms": _share(timings.generation_ms, timings.completion_tokens),
        "predicted_per_second": _per_second(timings.completion_tokens, timings.generation_ms),
    }


def _mistralrs(timings: Timings) -> dict[str, Any]:
    """Durations in seconds."""
    tokens = timings.prompt_tokens + timings.completion_tokens
    return {
        "avg_tok_per_sec": _per_second(tokens, timings.prefill_ms + timings.generation_ms),
        "avg_prompt_tok_per_sec": _per_second(timings.prompt_tokens, timings.prefill_ms),
        "avg_compl_tok_per_sec": _per_second(timings.completion_tokens, timings.generation_ms),
        "total_time_sec": _seconds(timings.total_ms),
        "total_prompt_time_sec": _seconds(timings.prefill_ms),
        "total_completion_time_sec": _seconds(timings.generation_ms),
    }


def _omlx(timings: Timings) -> dict[str, Any]:
    """Durations in seconds. Requests never wait for a model to be loaded."""
    return {
        "cached_tokens": timings.cached_tokens,
        "model_load_duration": 0.0,
        "time_to_first_token": _seconds(timings.time_to_first_token_ms),
        "total_time": _seconds(timings.total_ms),
        "prompt_eval_duration": _seconds(timings.prefill_ms),
        "generation_duration": _seconds(timings.generation_ms),
        "prompt_tokens_per_second": _per_second(timings.prompt_tokens, timings.prefill_ms),
        "generation_tokens_per_second": _per_second(
            timings.completion_tokens, timings.generation_ms
        ),
    }


def _vllm(timings: Timings) -> dict[str, Any]:
    """Durations in milliseconds."""
    return {
        "time_to_first_token_ms": _rounded(timings.time_to_first_token_ms),
        "generation_time_ms": _rounded(timings.generation_ms),
        "queue_time_ms": _rounded(timings.queue_ms),
        "mean_itl_ms": _share(timings.generation_ms, timings.completion_tokens - 1),
        "tokens_per_second": _per_second(timings.completion_tokens, timings.generation_ms),
        "speculative_decoding": None,
    }


def _rounded(value: float) -> float:
    return round(value, 3)


def _seconds(milliseconds: float) -> float:
    return round(milliseconds / MILLISECONDS, 6)


def _share(milliseconds: float, tokens: int) -> float:
    return _rounded(milliseconds / tokens) if tokens > 0 else 0.0


def _per_second(tokens: int, milliseconds: float) -> float:
    return _rounded(tokens * MILLISECONDS / milliseconds) if milliseconds > 0 else 0.0
