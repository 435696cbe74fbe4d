"""`POST /v1/completions`, and `POST /v1/completions:estimate`, which says what that would do."""

import asyncio
from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from gateway.accounts.usage import Outcome
from gateway.api.call import Call, read_call
from gateway.api.completion_service import Submission, submit
from gateway.api.context import ProcessContext
from gateway.api.error_handlers import CLIENT_CLOSED_REQUEST, error_style_of
from gateway.api.estimate import estimate
from gateway.api.ignored import ignored_header
from gateway.api.measuring import RequestMeasure
from gateway.api.plan import Plan, make_plan
from gateway.api.streaming import StreamedCompletion, Watch
from gateway.errors import GenerationTimeoutError
from gateway.quota.headers import dollars
from gateway.stream.assembler import WholeAnswer, collect

COST_HEADER: Final = "x-include-cost"
"""Says `true` or `false` where a request wants it otherwise than its account."""

router = APIRouter()


async def create_completion(request: Request) -> Response:
    """Authenticate, check, reserve, enqueue, and answer whole or as a stream."""
    measure = RequestMeasure("completions")
    try:
        call = await read_call(request)
        plan = await make_plan(call.context, call.principal, call.body, call.profile)
        submission = await submit(call, plan, shows_cost=_shows_cost(request, call))
        measure.accepted(submission.completion.model)
        if plan.request.stream:
            return await _stream(request, call.context, submission, measure)
        response = await _whole(request, call.context, submission, measure)
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
    call = await read_call(request)
    plan = await make_plan(call.context, call.principal, call.body, call.profile)
    return Response(
        msgspec.json.encode(estimate(call, plan)),
        media_type="application/json",
        headers=_plan_headers(plan),
    )


def _shows_cost(request: Request, call: Call) -> bool:
    asked = request.headers.get(COST_HEADER, "").lower()
    return asked == "true" or (asked != "false" and call.principal.shows_cost)


async def _whole(
    request: Request, context: ProcessContext, submission: Submission, measure: RequestMeasure
) -> Response:
    work = asyncio.ensure_future(collect(submission.completion, submission.generation))
    watch = Watch(request.receive, submission.generation)
    account = submission.account
    try:
        await asyncio.wait(
            {work, watch.task},
            timeout=context.settings.request_timeout.total_seconds(),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if work.done():
            answer = work.result()
            await account.finish()
            measure.finished(answer.usage)
            return _answer(submission, answer, _headers(submission, measure))
        if watch.gone:
            account.end(Outcome.CANCELLED)
            measure.disconnected()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        raise GenerationTimeoutError("The request took longer than it may.")
    except BaseException as error:
        account.fail(error)
        raise
    finally:
        watch.stop()
        work.cancel()
        await asyncio.shield(context.dispatcher.cancel(submission.generation))


def _answer(submission: Submission, answer: WholeAnswer, headers: dict[str, str]) -> Response:
    completion = submission.completion
    if completion.cost_of is not None:
        headers["x-cost"] = dollars(completion.cost_of(answer.usage))
    return Response(answer.content, media_type="application/json", headers=headers | answer.headers)


async def _stream(
    request: Request, context: ProcessContext, submission: Submission, measure: RequestMeasure
) -> Response:
    """Wait for the first event, so that a failure until then gets a real status; then begin the stream."""
    response = StreamedCompletion(
        context.dispatcher,
        submission.completion,
        submission.generation,
        account=submission.account,
        watch=Watch(request.receive, submission.generation),
        measure=measure,
        keep_alive_seconds=context.settings.keep_alive_interval.total_seconds(),
        headers=_headers(submission, measure),
    )
    try:
        await response.begin(timeout_seconds=context.settings.commit_after.total_seconds())
    except BaseException as error:
        submission.account.fail(error)
        await response.abandon()
        raise
    return response


# A plain route: FastAPI's own would look for parameters and dependencies in every request, which costs a
# fifth of the time that the gateway spends on it. Its documentation is in gateway.api.documentation.
router.add_route("/v1/completions", create_completion, methods=["POST"])
router.add_route("/v1/completions:estimate", estimate_completion, methods=["POST"])


def _headers(submission: Submission, measure: RequestMeasure) -> dict[str, str]:
    return {
        "openai-processing-ms": str(measure.elapsed_ms()),
        **submission.account.admission.headers,
        **_plan_headers(submission.plan),
    }


def _plan_headers(plan: Plan) -> dict[str, str]:
    headers = {"x-max-tokens-applied": str(plan.prepared.applied_max_tokens)}
    if plan.prepared.cut_tokens:
        headers["x-prompt-truncated"] = str(plan.prepared.cut_tokens)
    return headers | ignored_header(plan.request.ignored_parameters)
