"""Attempt spans: trace spans of a job's attempts.

A span lasts from the time the job is enqueued until the attempt ends or is lost. The worker's spans
are its children. The gateway exports the span, so the trace shows an attempt even if its worker was
killed. Each attempt's span links to the previous one.
"""

import msgspec
from opentelemetry.trace import Span, SpanContext

from common import tracing as names
from common.tracing import traceparent_of
from contract.messages import GenerationJob
from gateway.platform import tracing


class AttemptSpans:
    """The attempt spans of one job. At most one is open; a job of an untraced request has none."""

    __slots__ = ("_earlier", "_model", "_request", "_span")

    def __init__(self, job: GenerationJob, model: str) -> None:
        self._request = job.traceparent
        """The parent span of all attempts."""
        self._model = model
        self._earlier: SpanContext | None = None
        self._span: Span | None = None

    def begin(self, job: GenerationJob, number: int) -> GenerationJob:
        """Begin attempt `number`, counted from 1, and return the job to enqueue for it."""
        if not self._request:
            return job
        self._span = tracing.attempt_span(
            self._request,
            earlier=self._earlier,
            attributes={
                names.ATTEMPT_NUMBER: number,
                names.GATEWAY_ID: job.gateway,
                names.GEN_AI_REQUEST_MODEL: self._model,
                names.JOB_ID: job.id,
                names.REQUEST_ID: job.request_id,
                names.TENANT_ID: job.tenant,
            },
        )
        if self._span is None:
            return job
        context = self._span.get_span_context()
        earlier, self._earlier = self._earlier, context
        return msgspec.structs.replace(
            job,
            traceparent=traceparent_of(context),
            earlier_traceparent="" if earlier is None else traceparent_of(earlier),
        )

    def end(self, outcome: str, *, is_failure: bool = False) -> None:
        """End the open attempt, if any."""
        if self._span is None:
            return
        self._span.set_attribute(names.OUTCOME, outcome)
        if is_failure:
            tracing.fail(self._span, outcome)
        self._span.end()
        self._span = None

    def exemplar(self) -> dict[str, str] | None:
        """Return the exemplar of the open attempt for a histogram."""
        return tracing.exemplar_of(self._span)
