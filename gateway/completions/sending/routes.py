"""Stored responses: get them by id, cancel them, and resume their streams."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from gateway.completions.context import ProcessContext, context_of
from gateway.completions.rendering.assembler import collect
from gateway.completions.sending.event_ids import Position, read_position, read_stream
from gateway.completions.sending.measuring import RequestMeasure
from gateway.completions.sending.respond import measured, respond_streamed, respond_whole
from gateway.completions.sending.subscription import StoredSubscription
from gateway.completions.stored.service import Responses
from gateway.completions.stored.store import ResponseState, StoredResponse
from gateway.dialects.endpoint import ENDPOINTS, Endpoint
from gateway.dialects.parameters import ignored_header
from gateway.dialects.profile import PROFILES
from gateway.http.allowances import UnpaidRequests
from gateway.http.authorization import Authorizer
from gateway.http.body import BodyReader
from gateway.http.exchange import exchange_of
from gateway.http.services import services_of
from gateway.records.errors import ApiError, ErrorStyle, NotFoundError, shown
from gateway.records.principal import Principal
from gateway.records.scopes import Scope

router = APIRouter()

_ENDED: Final = {
    ResponseState.FINISHED: "completed",
    ResponseState.FAILED: "failed",
    ResponseState.CANCELLED: "cancelled",
    ResponseState.LEFT: "incomplete",
}


async def get_completion(request: Request, endpoint: Endpoint) -> Response:
    """Get a stored completion: whole, its status, or as a stream."""
    measure = RequestMeasure(f"{endpoint.name}.get", exchange_of(request.scope), generates=False)
    return await measured(request, measure, _get(request, endpoint, measure))


async def cancel_completion(request: Request, endpoint: Endpoint) -> Response:
    """Cancel a stored completion and return its status.

    A completion that has ended stays as it is.
    """
    measure = RequestMeasure(f"{endpoint.name}.cancel", exchange_of(request.scope), generates=False)
    return await measured(request, measure, _cancel(request, endpoint))


async def continue_stream(
    request: Request, endpoint: Endpoint, position: Position, measure: RequestMeasure
) -> Response:
    """Resume a stream after the last event that the client received.

    The request's own body is not run.
    """
    response = await _find(request, endpoint, position.request_id)
    await services_of(request)[BodyReader].read_counted(request, response.head.tenant_id)
    return await resend(request, response, measure, is_streamed=True, skip=position.number)


async def resend(
    request: Request,
    response: StoredResponse,
    measure: RequestMeasure,
    *,
    is_streamed: bool,
    skip: int = 0,
    has_ids: bool = True,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """Send a response to a client that did not start it, or not on this connection."""
    subscription = StoredSubscription(await context_of(request).responses.attach(response))
    headers = {**_headers(response, subscription), **headers}
    if is_streamed:
        return await respond_streamed(
            request, subscription, measure, headers=headers, skip=skip, has_ids=has_ids
        )
    return await respond_whole(request, subscription, measure, headers=headers)


async def status_response(
    context: ProcessContext,
    endpoint: Endpoint,
    response: StoredResponse,
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """Return a completion's status, with the error of a failed one."""
    head = response.head
    if response.state is ResponseState.RUNNING:
        status = "in_progress" if response.has_begun else "queued"
    else:
        status = _ENDED[response.state]
    body: dict[str, Any] = {
        "id": response.id,
        "object": endpoint.response_object,
        "created": head.created,
        "model": head.model,
        "background": head.is_background,
        "status": status,
    }
    if response.state is ResponseState.FAILED:
        failure = await _failure(context, response)
        body |= {} if failure is None else failure.body(_error_style(response))
    content = msgspec.json.encode(body)
    return Response(content, media_type="application/json", headers=dict(headers))


async def _get(request: Request, endpoint: Endpoint, measure: RequestMeasure) -> Response:
    response = await _find(request, endpoint, request.path_params["completion_id"])
    if read_stream(request):
        skip = read_position(request, response.id)
        return await resend(request, response, measure, is_streamed=True, skip=skip)
    if response.state is ResponseState.FINISHED:
        return await resend(request, response, measure, is_streamed=False)
    return await status_response(context_of(request), endpoint, response)


async def _cancel(request: Request, endpoint: Endpoint) -> Response:
    context = context_of(request)
    response = await _find(request, endpoint, request.path_params["completion_id"])
    return await status_response(context, endpoint, await context.responses.cancel(response))


async def _failure(context: ProcessContext, response: StoredResponse) -> ApiError | None:
    """Return the error with which a response ended, as its readers receive it."""
    reader = await context.responses.attach(response)
    try:
        await collect(reader.completion, reader.generation)
    except ApiError as error:
        return error
    finally:
        await reader.aclose()
    return None


async def _find(request: Request, endpoint: Endpoint, request_id: str) -> StoredResponse:
    """Return a response of this endpoint that the caller may read.

    From then on, errors have the style of the response's dialect. Raises NotFoundError, also for a
    response of another project or of a model that the caller may not use.
    """
    services, exchange = services_of(request), exchange_of(request.scope)
    principal = await services[Authorizer].authorize(request, Scope.COMPLETIONS)
    services[UnpaidRequests].admit(exchange, principal)
    response = None
    if endpoint.has_given(request_id):
        responses = services[Responses]
        response = await responses.find(request_id, tenant_id=principal.tenant_id)
    if response is None or not may_read(principal, response):
        raise NotFoundError(f"The completion {shown(request_id)} does not exist or has expired.")
    exchange.error_style = _error_style(response)
    return response


def may_read(principal: Principal, response: StoredResponse) -> bool:
    """Whether the caller may use the project and the model of a response of its tenant."""
    record = response.head.record
    in_project = principal.project_id in (None, record.project_id)
    names = (response.head.model, record.full_model, record.adapter or record.model)
    return in_project and any(map(principal.allows_model, names))


def _error_style(response: StoredResponse) -> ErrorStyle:
    return PROFILES[response.head.request["profile"]].error_style


def _headers(response: StoredResponse, subscription: StoredSubscription) -> dict[str, str]:
    applied = min(job.max_tokens for job in response.head.jobs)
    return {
        "x-max-tokens-applied": str(applied),
        **ignored_header(subscription.completion.request.ignored_parameters),
    }


# Plain routes, which gateway.process.openapi.operations describes.
for _endpoint in ENDPOINTS:
    _path = f"{_endpoint.path}/{{completion_id}}"
    router.add_route(_path, partial(get_completion, endpoint=_endpoint), methods=["GET"])
    _cancel_route = partial(cancel_completion, endpoint=_endpoint)
    router.add_route(f"{_path}/cancel", _cancel_route, methods=["POST"])
