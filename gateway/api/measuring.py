"""What is measured of one generation request, from its arrival to the end of its answer."""

import time

from contract.tracing import (
    ERROR_TYPE,
    GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK,
    GEN_AI_USAGE_CACHED_TOKENS,
    GEN_AI_USAGE_INPUT_TOKENS,
    GEN_AI_USAGE_OUTPUT_TOKENS,
)
from gateway import telemetry, tracing
from gateway.errors import ApiError, ErrorStyle, InternalError
from gateway.stream.completion import Usage


class RequestMeasure:
    """Counts a request exactly once, whichever way it ends."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._started_at = time.perf_counter()
        self._model = ""
        self._waits_for_reply = False
        self._status, self._code = 200, "ok"
        self._closed = False
        self._span = tracing.current()
        self._exemplar = tracing.exemplar()
        telemetry.REQUESTS_IN_PROGRESS.inc()

    def elapsed_ms(self) -> int:
        """Return the milliseconds since the request arrived."""
        return int((time.perf_counter() - self._started_at) * 1000)

    def accepted(self, model: str) -> None:
        """The request's jobs are on the queue. One that reads the answer of another has none."""
        self._model = model
        self._waits_for_reply = True

    def replied(self) -> None:
        """A worker was heard of; the first time counts."""
        if self._waits_for_reply:
            self._waits_for_reply = False
            elapsed = time.perf_counter() - self._started_at
            telemetry.TIME_TO_FIRST_TOKEN.labels(self._model).observe(elapsed, self._exemplar)
            self._span.set_attribute(GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, elapsed)

    def finished(self, usage: Usage) -> None:
        """All choices are complete."""
        if not self._model:
            return
        telemetry.PROMPT_TOKENS.labels(self._model).inc(usage.prompt_tokens)
        telemetry.CACHED_TOKENS.labels(self._model).inc(usage.cached_tokens)
        telemetry.COMPLETION_TOKENS.labels(self._model).inc(usage.completion_tokens)
        self._span.set_attributes(
            {
                GEN_AI_USAGE_INPUT_TOKENS: usage.prompt_tokens,
                GEN_AI_USAGE_CACHED_TOKENS: usage.cached_tokens,
                GEN_AI_USAGE_OUTPUT_TOKENS: usage.completion_tokens,
            }
        )

    def failed(self, error: BaseException, style: ErrorStyle = ErrorStyle.OPENAI) -> None:
        """The request ends with an error, told in a style that decides its status."""
        known = error if isinstance(error, ApiError) else InternalError()
        self._status, self._code = known.status_for(style), known.code
        if self._status >= 500:
            tracing.fail(self._span, known.code)
        else:
            self._span.set_attribute(ERROR_TYPE, known.code)

    def disconnected(self) -> None:
        """The client had gone before the end."""
        self._status, self._code = 499, "client_closed_request"
        self._span.set_attribute(ERROR_TYPE, self._code)
        telemetry.DISCONNECTS.inc()

    def close(self) -> None:
        """Count the request; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        telemetry.REQUESTS_IN_PROGRESS.dec()
        telemetry.REQUESTS.labels(self._endpoint, str(self._status), self._code).inc()
        if self._model:
            elapsed = time.perf_counter() - self._started_at
            telemetry.REQUEST_DURATION.labels(self._model).observe(elapsed, self._exemplar)
