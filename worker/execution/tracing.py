"""Trace spans of what this worker does with each attempt of a job.

The worker records times while a job runs and creates the spans when the job leaves it, so a token
costs nothing. A job is traced if its gateway traces it; the gateway decides the sampling.

    attempt (the gateway's)
    ├── queue        from enqueueing to the claim
    └── generate     from the claim to the end here; linked to the attempt that this one resumes
        ├── prefill  until the first token, including validation, and the wait inside the engine
        └── decode   until the end
"""

import time
from dataclasses import dataclass
from typing import Final

from opentelemetry.context import Context
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

from common import tracing as names
from common.tracing import Tracing, context_of, link_to
from contract.outcomes import FailureCode
from worker.execution.running_job import RunningJob
from worker.settings import WorkerSettings

SERVICE: Final = "sluice-worker"

_tracing: Final = Tracing()
_about: Final[dict[str, str]] = {}
"""Attributes of this worker."""


def start(settings: WorkerSettings) -> None:
    """Start tracing if the settings enable it. Raises ValueError for a bad `OTEL_` variable."""
    if settings.traces:
        from opentelemetry.sdk.trace.sampling import DEFAULT_OFF

        _tracing.start(SERVICE, instance=settings.worker_id, sampler=DEFAULT_OFF)
        _about[names.WORKER_ID] = settings.worker_id
        _about[names.GEN_AI_REQUEST_MODEL] = settings.served_name


def stop() -> None:
    """Stop tracing, and export pending spans within a few seconds."""
    _tracing.stop()


# Outcomes of attempts, beside the codes of failures.
FINISHED: Final = "finished"
RETURNED: Final = "handed_back"
"""Another worker resumes the job."""
ABANDONED: Final = "abandoned"
"""The gateway of the job is dead."""
REPLIES_LOST: Final = "replies_lost"
"""The worker dropped replies that it could not write."""
LOST: Final = "lost"
"""The lease belongs to another attempt now."""

_FAILURES: Final = frozenset({LOST, *FailureCode}) - {FailureCode.CANCELLED}


def attempt_ended(generation: RunningJob, outcome: str) -> None:
    """Create the spans of an attempt that has left this worker."""
    job = generation.job
    if _tracing.provider is None or not job.traceparent:
        return
    parent, times = context_of(job.traceparent), _Times.of(generation)
    _span(names.QUEUE, parent, times.enqueued, times.asked)
    generate = _tracing.tracer.start_span(
        names.GENERATE,
        parent,
        SpanKind.CONSUMER,
        start_time=times.asked,
        links=[link_to(job.earlier_traceparent)],
        attributes={
            **_about,
            names.ATTEMPT_NUMBER: generation.attempt,
            names.JOB_ID: job.id,
            names.OUTCOME: outcome,
            names.REQUEST_ID: job.request_id,
            names.TENANT_ID: job.tenant,
            names.GEN_AI_OPERATION: names.TEXT_COMPLETION,
            names.GEN_AI_PROVIDER: names.PROVIDER,
            names.GEN_AI_REQUEST_MAX_TOKENS: job.max_tokens,
            names.GEN_AI_RESPONSE_FINISH_REASONS: generation.finish_reasons,
            names.GEN_AI_USAGE_INPUT_TOKENS: generation.report.prompt_tokens,
            names.GEN_AI_USAGE_CACHED_TOKENS: generation.report.cached_tokens,
            names.GEN_AI_USAGE_OUTPUT_TOKENS: generation.report.completion_tokens,
        },
    )
    if outcome in _FAILURES:
        generate.set_attribute(ERROR_TYPE, outcome)
        generate.set_status(StatusCode.ERROR)
    within = set_span_in_context(generate, Context())
    _span(names.PREFILL, within, times.asked, times.first_token or times.ended)
    if times.first_token is not None:
        _span(names.DECODE, within, times.first_token, times.ended)
    generate.end(times.ended)


@dataclass(frozen=True, slots=True)
class _Times:
    """Times of an attempt's events, in nanoseconds of Unix time."""

    enqueued: int
    asked: int
    first_token: int | None
    ended: int

    @classmethod
    def of(cls, generation: RunningJob) -> "_Times":
        """Return the times of an attempt that ends now."""
        now, ended = time.monotonic(), time.time_ns()

        def at(moment: float) -> int:
            return ended - round((now - moment) * 1e9)

        first = generation.first_token_at
        return cls(
            enqueued=at(generation.asked_at - (generation.waited_seconds or 0)),
            asked=at(generation.asked_at),
            first_token=None if first is None else at(first),
            ended=ended,
        )


def _span(name: str, parent: Context, start: int, end: int) -> None:
    _tracing.tracer.start_span(name, parent, start_time=start).end(end)
