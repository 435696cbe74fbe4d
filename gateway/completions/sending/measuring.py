"""Metrics of one generation request, from its arrival to the end of its response."""

import time
from collections.abc import Awaitable, Iterable
from typing import ClassVar

from fastapi import Request, Response
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.trace import get_current_span
from starlette.requests import ClientDisconnect

from common.tracing import GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK
from contract.messages import Delta
from gateway.completions.queue.generation import Reply
from gateway.http.error_handlers import CLIENT_CLOSED_REQUEST, error_style_of
from gateway.http.exchange import Exchange
from gateway.limits.refusal_log import Refusals
from gateway.platform import telemetry, tracing
from gateway.records.errors import ApiError, ErrorStyle, InternalError


class RequestMeasure:
    """Counts a request exactly once, however it ends.

    Args:
        endpoint: Endpoint name in the metrics.
        exchange: The request; its `tenant_id` is set after authentication.
        refusals: Records its refusal if it generates text, rather than reads an earlier response.
    """

    in_progress: ClassVar = 0
    """Number of requests that are measured and not counted yet."""

    def __init__(self, endpoint: str, exchange: Exchange, refusals: Refusals | None = None) -> None:
        self.endpoint = endpoint
        self._exchange = exchange
        self._refusals = refusals
        self._started_at = time.perf_counter()
        self._model = ""
        self.checked_model = ""
        """The model of a request that is valid."""
        self.waits_for_token = False
        """Whether the first token is still to be measured."""
        self._status, self._code = 200, "ok"
        self._closed = False
        self.is_streaming = False
        """Whether a stream closes the measure at its end."""
        self._span = get_current_span()
        self._exemplar = tracing.exemplar_of(self._span)
        RequestMeasure.in_progress += 1

    async def until_response(self, request: Request, responding: Awaitable[Response]) -> Response:
        """Measure a request until its response is ready. A stream records its own end."""
        try:
            response = await responding
        except ClientDisconnect:
            self.disconnected()
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        except BaseException as error:
            self.failed(error, error_style_of(request))
            self.close()
            raise
        if not self.is_streaming:
            self.close()
        return response

    def elapsed_ms(self) -> int:
        """Return the milliseconds since the request arrived."""
        return int((time.perf_counter() - self._started_at) * 1000)

    def accepted(self, model: str) -> None:
        """Record that the jobs are queued. A request that reads another's response has no jobs."""
        self._model = model
        self.waits_for_token = True

    def replied(self, replies: Iterable[Reply]) -> None:
        """Record replies that the client reads at once; the first one with a token counts."""
        if self.waits_for_token and any(isinstance(each.message, Delta) for each in replies):
            self.waits_for_token = False
            elapsed = time.perf_counter() - self._started_at
            telemetry.TIME_TO_FIRST_TOKEN.labels(self._model).observe(elapsed, self._exemplar)
            self._span.set_attribute(GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, elapsed)

    def failed(self, error: BaseException, style: ErrorStyle = ErrorStyle.OPENAI) -> None:
        """Record that the request ends with an error, in a style that decides its status."""
        failure = error if isinstance(error, ApiError) else InternalError()
        self._status, self._code = failure.status_for(style), failure.code
        if self._status >= 500:
            tracing.fail(self._span, failure.code)
        else:
            self._span.set_attribute(ERROR_TYPE, failure.code)
        if self._refusals is not None and not self._model:
            exchange = self._exchange
            self._refusals.of_request(
                error,
                tenant_id=exchange.tenant_id,
                credential_id=exchange.credential_id,
                project_id=exchange.project_id,
                model=self.checked_model,
            )

    def disconnected(self) -> None:
        """Record that the client disconnected before the end."""
        self._status, self._code = 499, "client_closed_request"
        self._span.set_attribute(ERROR_TYPE, self._code)
        telemetry.DISCONNECTS.inc()

    def close(self) -> None:
        """Count the request; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        RequestMeasure.in_progress -= 1
        telemetry.REQUESTS.labels(self.endpoint, str(self._status), self._code).inc()
        if self._exchange.tenant_id:
            tenant = telemetry.TENANTS.of(self._exchange.tenant_id)
            telemetry.TENANT_REQUESTS.labels(tenant, str(self._status)).inc()
        if self._model:
            elapsed = time.perf_counter() - self._started_at
            telemetry.REQUEST_DURATION.labels(self._model).observe(elapsed, self._exemplar)


telemetry.REQUESTS_IN_PROGRESS.set_function(lambda: RequestMeasure.in_progress)
