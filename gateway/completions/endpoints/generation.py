"""Generation endpoints, each with an `:estimate` endpoint for a dry run."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from common import tracing as names
from common.tracing import PLAN
from gateway.completions.admission.call import Call, read_call
from gateway.completions.admission.check import CheckedRequest, check_request
from gateway.completions.admission.idempotency import (
    REPLAYED_HEADER,
    find_earlier,
    read_idempotent_request,
    release,
)
from gateway.completions.admission.model_choice import choose_allowed
from gateway.completions.admission.submit import Submission, draft_record, submit
from gateway.completions.idempotency.registry import IdempotentRequest
from gateway.completions.sending.event_ids import read_event_ids, read_last_event_id
from gateway.completions.sending.measuring import RequestMeasure
from gateway.completions.sending.respond import measured, respond_streamed, respond_whole
from gateway.completions.sending.routes import continue_stream, resend, status_response
from gateway.completions.sending.subscription import InitialSubscription
from gateway.completions.stored.store import StoredResponse
from gateway.dialects.bodies import require_model
from gateway.dialects.effective import effective_parameters
from gateway.dialects.endpoint import ENDPOINTS, INVOCATIONS, NATIVE_ENDPOINTS, Endpoint
from gateway.dialects.parameters import ignored_header
from gateway.dialects.request import GenerationRequest
from gateway.http.exchange import exchange_of
from gateway.platform import tracing
from gateway.records.principal import Principal

COST_HEADER: Final = "x-include-cost"
"""`true` or `false` overrides the account's default for one request."""

router = APIRouter()


async def create_completion(
    request: Request, endpoint: Endpoint, *, authorized: Principal | None = None
) -> Response:
    """Authenticate, check, reserve, enqueue, and respond with a whole response or a stream.

    A client that resumes a stream, or repeats an Idempotency-Key, gets the original response. An
    `authorized` caller sends no credential.
    """
    measure = RequestMeasure(endpoint.name, exchange_of(request.scope), generates=True)
    return await measured(request, measure, _create(request, endpoint, measure, authorized))


async def estimate_completion(
    request: Request, endpoint: Endpoint, *, authorized: Principal | None = None
) -> Response:
    """Estimate a request without running it."""
    call = await read_call(request, authorized=authorized)
    checked = await check_request(call, endpoint)
    return Response(
        msgspec.json.encode(estimate(call, checked)),
        media_type="application/json",
        headers=_applied_headers(checked),
    )


async def _create(
    request: Request, endpoint: Endpoint, measure: RequestMeasure, authorized: Principal | None
) -> Response:
    if authorized is None and (position := read_last_event_id(request)) is not None:
        return await continue_stream(request, endpoint, position, measure)
    call = await read_call(
        request,
        is_paid=True,
        has_native_path=endpoint.has_native_path,
        authorized=authorized,
    )
    endpoint = endpoint.of(call.body)
    measure.endpoint = endpoint.name
    idempotent = await read_idempotent_request(request, call)
    # These clients may read the response again, so they need a position in it.
    may_resume = idempotent is not None or call.body.get("background") is True
    has_ids = read_event_ids(request, default=may_resume)
    request_id = endpoint.new_id()
    if idempotent is None:
        submission = await _submit(request, call, endpoint, measure, request_id=request_id)
    else:
        # Do not replay a stored response to a caller that may not use its model.
        name = require_model(call.body, call.profile)
        choose_allowed(call.context, call.principal, name, profile=call.profile, body=call.body)
        earlier = await find_earlier(call, idempotent, request_id)
        if earlier is not None:
            call.context.unpaid.count(exchange_of(request.scope), is_fault=True)
            return await _replay(request, call, endpoint, earlier, measure, has_ids=has_ids)
        submission = await _submit_with_key(
            request, call, endpoint, idempotent, measure, request_id=request_id
        )
    measure.accepted(submission.checked.card.model)
    # Each paid request allows one more failure.
    call.context.unpaid.use(exchange_of(request.scope).caller, -1)
    return await _respond(request, call, endpoint, submission, measure, has_ids=has_ids)


async def _submit(
    request: Request,
    call: Call,
    endpoint: Endpoint,
    measure: RequestMeasure,
    *,
    request_id: str,
    is_idempotent: bool = False,
) -> Submission:
    with tracing.span(PLAN):
        checked = await check_request(call, endpoint)
    measure.checked_model = checked.card.model
    note_request(checked, request_id)
    return await submit(
        call,
        checked,
        request_id=request_id,
        shows_cost=_shows_cost(request, call),
        is_idempotent=is_idempotent,
    )


async def _submit_with_key(
    request: Request,
    call: Call,
    endpoint: Endpoint,
    idempotent: IdempotentRequest,
    measure: RequestMeasure,
    *,
    request_id: str,
) -> Submission:
    """Submit a request under its Idempotency-Key, and free the key if that fails."""
    try:
        return await _submit(
            request, call, endpoint, measure, request_id=request_id, is_idempotent=True
        )
    except BaseException:
        await release(call, idempotent, request_id)
        raise


async def _replay(
    request: Request,
    call: Call,
    endpoint: Endpoint,
    response: StoredResponse,
    measure: RequestMeasure,
    *,
    has_ids: bool,
) -> Response:
    is_streamed = call.body.get("stream") is True
    headers = {REPLAYED_HEADER: "true"}
    if response.head.is_background and not is_streamed:
        return await status_response(call.context, endpoint, response, headers=headers)
    return await resend(
        request, response, measure, is_streamed=is_streamed, has_ids=has_ids, headers=headers
    )


async def _respond(
    request: Request,
    call: Call,
    endpoint: Endpoint,
    submission: Submission,
    measure: RequestMeasure,
    *,
    has_ids: bool,
) -> Response:
    headers = {**submission.settlement.admission.headers, **_applied_headers(submission.checked)}
    is_streamed = submission.checked.request.stream
    responses = call.context.responses
    response = submission.response
    if response is not None and response.head.is_background:
        responses.leave(submission.settlement)
        if not is_streamed:
            return await status_response(call.context, endpoint, response, headers=headers)
        return await resend(
            request, response, measure, is_streamed=True, has_ids=has_ids, headers=headers
        )
    subscription = InitialSubscription(
        responses, submission.settlement, submission.completion, submission.generation
    )
    if is_streamed:
        return await respond_streamed(
            request, subscription, measure, headers=headers, has_ids=has_ids
        )
    return await respond_whole(request, subscription, measure, headers=headers)


def _shows_cost(request: Request, call: Call) -> bool:
    asked = request.headers.get(COST_HEADER, "").lower()
    return asked == "true" or (asked != "false" and call.principal.shows_cost)


def _applied_headers(checked: CheckedRequest) -> Mapping[str, str]:
    headers = {"x-max-tokens-applied": str(checked.prepared.applied_max_tokens)}
    if checked.alias is not None:
        headers |= checked.alias.headers
    if checked.prepared.cut_tokens:
        headers["x-prompt-truncated"] = str(checked.prepared.cut_tokens)
    return headers | ignored_header(checked.request.ignored_parameters)


# Plain routes: FastAPI's own resolve parameters and dependencies for every request, a fifth of the
# gateway's time per request. Their documentation is in gateway.process.openapi.operations.
for _endpoint in (*ENDPOINTS, INVOCATIONS, *NATIVE_ENDPOINTS):
    _create_route = partial(create_completion, endpoint=_endpoint)
    router.add_route(_endpoint.path, _create_route, methods=["POST"])
for _endpoint in ENDPOINTS:
    _estimate_route = partial(estimate_completion, endpoint=_endpoint)
    router.add_route(f"{_endpoint.path}:estimate", _estimate_route, methods=["POST"])


def estimate(call: Call, checked: CheckedRequest) -> dict[str, Any]:
    """Return the usage that a request would have, its possible cost and its parameters."""
    request, settings = checked.request, call.context.settings
    prompt_tokens = sum(len(prompt.token_ids) for prompt in checked.prepared.prompts)
    return {
        "object": "completion.estimate",
        "model": checked.model,
        "dialect": request.profile.name,
        "service_tier": checked.service_tier,
        "prompt_tokens": prompt_tokens,
        "prompt_truncated": checked.prepared.cut_tokens,
        "max_tokens": checked.prepared.applied_max_tokens,
        "completion_tokens_max": checked.most.completion_tokens,
        "total_tokens_max": prompt_tokens + checked.most.completion_tokens,
        "context_window": checked.card.context_window,
        "parameters": effective_parameters(request, checked.prepared.sampling),
        "ignored_parameters": list(request.ignored_parameters),
        "cost": _cost(call, checked),
        "limits": {
            "max_prompts": settings.max_prompts,
            "max_body_bytes": settings.max_body_bytes,
            "max_waiting_prompts": settings.max_waiting_jobs_of_tenant,
            **{limits.scope.value: limits.limits.body() for limits in call.principal.limits},
        },
    }


def _cost(call: Call, checked: CheckedRequest) -> dict[str, int]:
    """Return the cost of the prompt alone and the maximum total cost."""
    record, most = draft_record(call, checked, ""), checked.most
    return {
        "prompt_micros": record.cost_of(**most._replace(completion_tokens=0)._asdict()),
        "max_micros": record.cost_of(**most._asdict()),
    }


def note_request(checked: CheckedRequest, completion_id: str) -> None:
    """Set the generation attributes of the current request's span."""
    if not tracing.is_on():
        return
    request = checked.request
    attributes: dict[str, str | bool | int | float] = {
        names.GEN_AI_OPERATION: names.TEXT_COMPLETION if request.chat is None else names.CHAT,
        names.GEN_AI_PROVIDER: names.PROVIDER,
        names.GEN_AI_REQUEST_CHOICES: request.n,
        names.GEN_AI_REQUEST_MAX_TOKENS: checked.prepared.applied_max_tokens,
        names.GEN_AI_REQUEST_MODEL: checked.model,
        names.GEN_AI_REQUEST_STREAM: request.stream,
        names.GEN_AI_RESPONSE_ID: completion_id,
        names.GEN_AI_RESPONSE_MODEL: checked.card.model,
    }
    if tracing.shows_content():
        attributes[names.GEN_AI_INPUT] = json.dumps(_input(request))[: tracing.MOST_CONTENT]
    tracing.note(attributes)


def _input(request: GenerationRequest) -> list[dict[str, Any]]:
    """Return the client's input in the format of OpenTelemetry's conventions."""
    if request.chat is not None:
        return [
            {
                "role": message.get("role"),
                "parts": [{"type": "text", "content": message.get("content")}],
            }
            for message in request.chat.messages
        ]
    return [
        {"role": "user", "parts": [{"type": "text", "content": prompt}]}
        for prompt in request.prompts
    ]
