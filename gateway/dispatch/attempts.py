"""The spans of a job's attempts: each from when the job is put on the queue to the attempt's end or loss.

The worker's spans of an attempt belong to it. As it is the gateway that exports it, an attempt shows up in the
trace also if its worker was killed, and the next one is linked to it.
"""

import msgspec
from opentelemetry.trace import Span, SpanContext

from contract.messages import GenerationJob
from contract.tracing import (
    ATTEMPT_NUMBER,
    GATEWAY_ID,
    GEN_AI_REQUEST_MODEL,
    JOB_ID,
    OUTCOME,
    REQUEST_ID,
    TENANT_ID,
    traceparent_of,
)
from gateway import tracing


class Attempts:
    """Those of one job, of which one at most is open. A job whose request is not traced has none."""

    __slots__ = ("_earlier", "_model", "_request", "_span")

    def __init__(self, job: GenerationJob, model: str) -> None:
        self._request = job.traceparent
        """The span that all of them belong to."""
        self._model = model
        self._earlier: SpanContext | None = None
        self._span: Span | None = None

    def begin(self, job: GenerationJob, number: int) -> GenerationJob:
        """Begin an attempt, counted from 1, and return the job as it is to be enqueued for it."""
        self._span = tracing.attempt_span(
            self._request,
            earlier=self._earlier,
            attributes={
                ATTEMPT_NUMBER: number,
                GATEWAY_ID: job.gateway,
                GEN_AI_REQUEST_MODEL: self._model,
                JOB_ID: job.id,
                REQUEST_ID: job.request_id,
                TENANT_ID: job.tenant,
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
        """End the open attempt, if there is one."""
        if self._span is None:
            return
        self._span.set_attribute(OUTCOME, outcome)
        if is_failure:
            tracing.fail(self._span, outcome)
        self._span.end()
        self._span = None

    def exemplar(self) -> dict[str, str] | None:
        """Return what a histogram remembers of the open attempt."""
        return tracing.exemplar_of(self._span)
