"""`POST /v1/completions`, and `POST /v1/completions:estimate`, which says what that would do."""

import asyncio

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from gateway.accounts.scopes import Scope
from gateway.api.body import read_json_body
from gateway.api.completion_service import Submission, submit
from gateway.api.context import ProcessContext, context_of
from gateway.api.error_handlers import CLIENT_CLOSED_REQUEST, error_style_of
from gateway.api.estimate import estimate
from gateway.api.ignored import ignored_header
from gateway.api.measuring import RequestMeasure
from gateway.api.plan import Plan, make_plan, profile_of
from gateway.api.streaming import StreamedCompletion, Watch
from gateway.auth.principal import Principal
from gateway.dialects.choice import DIALECT_HEADER
from gateway.dialects.wire import parse_object
from gateway.errors import GenerationTimeoutError
from gateway.stream.assembler import collect

router = APIRouter()


async def create_completion(request: Request) -> Response:
    """Authenticate, check, enqueue, and answer whole or as a stream."""
    measure = RequestMeasure("completions")
    try:
        context = context_of(request)
        principal, plan = await _plan(request, context)
        submission = await submit(context, principal, plan)
        measure.accepted(submission.completion.model)
        if plan.request.stream:
            return await _stream(request, context, submission, measure)
        response = await _whole(request, context, submission, measure)
    except ClientDisconnect:
        measure.disconnected()
        response = Response(status_code=CLIENT_CLOSED_REQUEST)
    except BaseException as error:
        measure.failed(error, error_style_of(request))
        measure.close()
        raise
    measure.close()
    return response


async def estimate_completion(request: Request) -> Response:
    """Say what a completion request would do, without running anything."""
    context = context_of(request)
    _, plan = await _plan(request, context)
    body = estimate(plan, context.settings)
    return Response(
        msgspec.json.encode(body), media_type="application/json", headers=_plan_headers(plan)
    )


async def _plan(request: Request, context: ProcessContext) -> tuple[Principal, Plan]:
    principal = await context.authenticator.authenticate(request.headers.get("authorization"))
    principal.require_scope(Scope.COMPLETIONS)
    body = parse_object(await read_json_body(request, context.settings))
    profile = await profile_of(context, principal, body, header=request.headers.get(DIALECT_HEADER))
    # From here on the client gets its errors in its own dialect.
    request.state.error_style = profile.error_style
    return principal, await make_plan(context, principal, body, profile)


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
            answer = work.result()
            measure.finished(answer.usage)
            headers = _headers(submission, measure) | answer.headers
            return Response(answer.content, media_type="application/json", headers=headers)
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
router.add_route("/v1/completions:estimate", estimate_completion, methods=["POST"])


def _headers(submission: Submission, measure: RequestMeasure) -> dict[str, str]:
    return {"openai-processing-ms": str(measure.elapsed_ms())} | _plan_headers(submission.plan)


def _plan_headers(plan: Plan) -> dict[str, str]:
    headers = {"x-max-tokens-applied": str(plan.prepared.applied_max_tokens)}
    if plan.prepared.cut_tokens:
        headers["x-prompt-truncated"] = str(plan.prepared.cut_tokens)
    return headers | ignored_header(plan.request.ignored_parameters)
