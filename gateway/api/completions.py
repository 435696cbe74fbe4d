"""`POST /v1/completions`."""

import asyncio
import re
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from gateway.accounts.scopes import Scope
from gateway.api.body import read_json_body
from gateway.api.completion_service import Submission, submit
from gateway.api.context import ProcessContext, context_of
from gateway.api.measuring import RequestMeasure
from gateway.api.streaming import StreamedCompletion, Watch
from gateway.auth.principal import Principal
from gateway.dialects.wire import parse_object
from gateway.errors import GenerationTimeoutError
from gateway.stream.assembler import collect

router = APIRouter()

CLIENT_CLOSED_REQUEST = 499
"""Never seen by anybody; tells logs and metrics that the client had gone."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_NAMED_PARAMETERS = 32


async def create_completion(request: Request) -> Response:
    """Authenticate, check, enqueue, and answer whole or as a stream."""
    measure = RequestMeasure("completions")
    try:
        context = context_of(request)
        body = await _authorized_body(request, context)
        submission = await submit(context, *body)
        measure.accepted(submission.completion.model)
        if submission.completion.request.stream:
            return await _stream(request, context, submission, measure)
        response = await _whole(request, context, submission, measure)
    except ClientDisconnect:
        measure.disconnected()
        response = Response(status_code=CLIENT_CLOSED_REQUEST)
    except BaseException as error:
        measure.failed(error)
        measure.close()
        raise
    measure.close()
    return response


async def _authorized_body(
    request: Request, context: ProcessContext
) -> tuple[Principal, dict[str, Any]]:
    principal = await context.authenticator.authenticate(request.headers.get("authorization"))
    principal.require_scope(Scope.COMPLETIONS)
    return principal, parse_object(await read_json_body(request, context.settings))


async def _whole(
    request: Request, context: ProcessContext, submission: Submission, measure: RequestMeasure
) -> Response:
    work = asyncio.ensure_future(collect(submission.completion, submission.generation))
    watch = Watch(request.receive, submission.generation)
    try:
        await asyncio.wait(
            {work, watch.task},
            timeout=context.settings.request_timeout.total_seconds(),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if work.done():
            content, usage = work.result()
            measure.finished(usage)
            headers = _headers(submission, measure)
            return Response(content, media_type="application/json", headers=headers)
        if watch.gone:
            measure.disconnected()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        raise GenerationTimeoutError("The request took longer than it may.")
    finally:
        watch.stop()
        work.cancel()
        await asyncio.shield(context.dispatcher.cancel(submission.generation))


async def _stream(
    request: Request, context: ProcessContext, submission: Submission, measure: RequestMeasure
) -> Response:
    """Wait for the first event, so that a failure until then gets a real status; then begin the stream."""
    response = StreamedCompletion(
        context.dispatcher,
        submission.completion,
        submission.generation,
        watch=Watch(request.receive, submission.generation),
        measure=measure,
        keep_alive_seconds=context.settings.keep_alive_interval.total_seconds(),
        headers=_headers(submission, measure),
    )
    try:
        await response.begin(timeout_seconds=context.settings.commit_after.total_seconds())
    except BaseException:
        await response.abandon()
        raise
    return response


# A plain route: FastAPI's own would look for parameters and dependencies in every request, which costs a
# fifth of the time that the gateway spends on it. Its documentation is in gateway.api.documentation.
router.add_route("/v1/completions", create_completion, methods=["POST"])


def _headers(submission: Submission, measure: RequestMeasure) -> dict[str, str]:
    headers = {
        "x-max-tokens-applied": str(submission.applied_max_tokens),
        "openai-processing-ms": str(measure.elapsed_ms()),
    }
    # Names come from the client: only such as are safe in a header are repeated.
    ignored = [
        name for name in submission.completion.request.ignored_parameters if _NAME.fullmatch(name)
    ]
    if ignored:
        headers["x-ignored-params"] = ",".join(ignored[:MAX_NAMED_PARAMETERS])
    return headers
