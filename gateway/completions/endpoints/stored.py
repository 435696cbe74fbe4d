"""Stored responses: get them by id, cancel them, and resume their streams."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response

from gateway.accounts.routes_common import PageSize
from gateway.completions.endpoints.event_ids import (
    POSITION_QUERY,
    Position,
    read_position,
    read_stream,
)
from gateway.completions.rendering.form_registry import collect
from gateway.completions.rendering.responses import ResponseObjects
from gateway.completions.sealing import Sealer
from gateway.completions.sending.measuring import RequestMeasure
from gateway.completions.sending.respond import Recipient, ResponseSender
from gateway.completions.sending.subscription import StoredSubscription
from gateway.completions.stored.kept import Kept
from gateway.completions.stored.service import Responses
from gateway.completions.stored.store import StoredResponse
from gateway.dialects.endpoint import ENDPOINTS, RESPONSES, Endpoint
from gateway.dialects.parameters import ignored_header
from gateway.dialects.profile import PROFILES
from gateway.dialects.request import ResponseForm
from gateway.dialects.responses.request import kept_options
from gateway.http.allowances import UnpaidRequests
from gateway.http.authorization import Authorizer
from gateway.http.body import BodyReader
from gateway.http.exchange import exchange_of
from gateway.http.query import takes_query
from gateway.http.services import services_of
from gateway.limits.replies import RequestState
from gateway.platform.concurrency.large_work import LargeWork
from gateway.platform.database.paging import PageRequest
from gateway.records.errors import (
    ApiError,
    ErrorStyle,
    NotFoundError,
    StateConflictError,
    must,
    shown,
)
from gateway.records.principal import Principal
from gateway.records.scopes import Scope

router = APIRouter()

_INCLUDE: Final = ("include", "include[]")
"""Queries without effect: items have what the `include` of their request has asked for."""
_ENDED: Final = {
    RequestState.FINISHED: "completed",
    RequestState.FAILED: "failed",
    RequestState.CANCELLED: "cancelled",
    RequestState.PAUSED: "incomplete",
}


@dataclass(eq=False)
class StoredCompletions:
    """Serves clients of responses that another request has begun."""

    _authorizer: Authorizer
    _unpaid: UnpaidRequests
    _bodies: BodyReader
    _responses: Responses
    _sender: ResponseSender
    _sealer: Sealer
    _large_work: LargeWork

    async def continue_stream(
        self, request: Request, endpoint: Endpoint, position: Position, measure: RequestMeasure
    ) -> Response:
        """Resume a stream after the last event that the client received.

        The request's own body is not run.
        """
        response = await self._find(request, endpoint, position.request_id)
        if isinstance(response, Kept):
            raise _without_events()
        await self._bodies.read_counted(request, response.head.tenant_id)
        skip = position.number
        return await self.resend(response, Recipient(request, measure, is_streamed=True, skip=skip))

    async def resend(
        self,
        response: StoredResponse,
        recipient: Recipient,
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Response:
        """Send a response to a client that did not start it, or not on this connection."""
        subscription = StoredSubscription(await self._responses.attach(response))
        headers = {**_headers(response, subscription), **headers}
        return await self._sender.send(subscription, recipient, headers)

    async def status(
        self,
        endpoint: Endpoint,
        response: StoredResponse,
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Response:
        """Return a completion's status, with the error of a failed one."""
        head, failure = response.head, None
        # In the background, one that was left resumes when a client looks at it.
        resumes = response.state is RequestState.PAUSED and head.is_background
        # A failover may have lost its admission: its gateway reserves again.
        if resumes or response.state in (RequestState.CLAIMED, RequestState.RUNNING):
            status = "in_progress" if response.has_begun else "queued"
        else:
            status = _ENDED[response.state]
        if response.state is RequestState.FAILED:
            failure = await self._failure(response)
        if endpoint.form is ResponseForm.RESPONSES:
            # An incomplete response is one that its own length has ended.
            status = "cancelled" if response.state is RequestState.PAUSED else status
            objects = ResponseObjects(head.completion(self._sealer))
            content = bytes(objects.response(status, error=failure))
        else:
            body: dict[str, Any] = {
                "id": response.id,
                "object": endpoint.response_object,
                "created": head.created,
                "model": head.model,
                "background": head.is_background,
                "status": status,
            }
            body |= {} if failure is None else failure.body(_error_style(endpoint, response))
            content = msgspec.json.encode(body)
        return Response(content, media_type="application/json", headers=dict(headers))

    async def get(self, request: Request, endpoint: Endpoint, measure: RequestMeasure) -> Response:
        """Get a stored completion: whole, its status, or as a stream; a kept one whole."""
        response = await self._find(request, endpoint, request.path_params["completion_id"])
        is_streamed = read_stream(request)
        if isinstance(response, Kept):
            if is_streamed:
                raise _without_events()
            return await self._whole(request, response)
        if is_streamed:
            is_from_zero = endpoint.form is ResponseForm.RESPONSES
            skip = read_position(request, response.id, is_from_zero=is_from_zero)
            recipient = Recipient(request, measure, is_streamed=True, skip=skip)
            return await self.resend(response, recipient)
        if response.state is RequestState.FINISHED:
            return await self.resend(response, Recipient(request, measure, is_streamed=False))
        return await self.status(endpoint, response)

    async def cancel(self, request: Request, endpoint: Endpoint, _: RequestMeasure) -> Response:
        """Cancel a stored completion and return its status.

        A completion that has ended stays as it is.
        """
        response = await self._find(request, endpoint, request.path_params["completion_id"])
        if isinstance(response, Kept):
            return await self._whole(request, response)
        return await self.status(endpoint, await self._responses.cancel(response))

    async def delete(self, request: Request, endpoint: Endpoint, _: RequestMeasure) -> Response:
        """Delete a stored or kept response. One that runs is cancelled first."""
        response_id = request.path_params["completion_id"]
        response = await self._find(request, endpoint, response_id)
        if isinstance(response, Kept):
            await self._responses.kept.remove(response_id)
        else:
            response = await self._responses.cancel(response)
            if not response.state.is_end:
                raise StateConflictError(f"{response_id} is still running. Cancel it, and retry.")
            # Others need no database.
            if kept_options(response.head.generation_request()):
                await self._responses.kept.remove(response_id)
            await self._responses.forget(response.head)
        body = {"id": response_id, "object": endpoint.response_object, "deleted": True}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def input_items(
        self, request: Request, response_id: str, wanted: PageRequest
    ) -> dict[str, Any]:
        """Return a page of the input of a kept response, with that of responses before it."""
        principal = await self._caller(request, RESPONSES)
        kept = await self._find_kept(principal, response_id)
        beside = self._large_work.of(principal.tenant_id, size=len(kept.input))
        return await beside(partial(_page, kept.input, wanted))

    async def _whole(self, request: Request, kept: Kept) -> Response:
        """Return a kept response."""

        def whole() -> bytes:
            response, before = map(msgspec.json.decode, kept)
            return msgspec.json.encode(response | before["echo"])

        tenant_id = exchange_of(request.scope).tenant_id
        content = await self._large_work.of(tenant_id, size=sum(map(len, kept)))(whole)
        return Response(content, media_type="application/json")

    async def _failure(self, response: StoredResponse) -> ApiError | None:
        """Return the error with which a response ended, as its readers receive it."""
        reader = await self._responses.attach(response)
        try:
            await collect(reader.completion, reader.generation)
        except ApiError as error:
            return error
        finally:
            await reader.aclose()
        return None

    async def _caller(self, request: Request, endpoint: Endpoint) -> Principal:
        """Return the caller of a request that nobody pays. Raises an ApiError."""
        exchange = exchange_of(request.scope)
        exchange.error_style = endpoint.error_style
        principal = await self._authorizer.authorize(request, Scope.COMPLETIONS)
        self._unpaid.admit(exchange, principal)
        return principal

    async def _find(
        self, request: Request, endpoint: Endpoint, request_id: str
    ) -> StoredResponse | Kept:
        """Return a stored response that the caller may read, or else a kept one.

        From then on, errors have the style of the response's dialect. Raises NotFoundError, also
        for a response of another project or of a model that the caller may not use, and
        StoreUnavailableError if Redis may have lost it for the moment.
        """
        principal = await self._caller(request, endpoint)
        response = None
        if endpoint.has_given(request_id):
            response = await self._responses.find(request_id, tenant_id=principal.tenant_id)
            if response is None:
                await self._responses.require_intact()
        if response is None or not response.is_readable_by(principal):
            return await self._find_kept(principal, request_id)
        exchange_of(request.scope).error_style = _error_style(endpoint, response)
        return response

    async def _find_kept(self, principal: Principal, request_id: str) -> Kept:
        found = dict[str, Kept]()
        if RESPONSES.has_given(request_id):
            found = await self._responses.kept.find(principal, {request_id: True})
        if request_id not in found:
            raise NotFoundError(f"The response {shown(request_id)} does not exist or has expired.")
        return found[request_id]


def _without_events() -> NotFoundError:
    return NotFoundError("The events of this response have expired. Get it without 'stream'.")


def _page(kept: bytes, wanted: PageRequest) -> dict[str, Any]:
    items = msgspec.json.decode(kept)["items"][:: -1 if wanted.is_newest_first else 1]
    ids: list[str | None] = [item["id"] for item in items]
    if wanted.after not in (None, *ids):
        raise must("after", "be the id of an item of this list", wanted.after)
    start = 0 if wanted.after is None else ids.index(wanted.after) + 1
    end = start + wanted.limit
    first, *_, last = ids[start:end] * 2 or (None, None)
    page = {"object": "list", "data": items[start:end], "has_more": end < len(ids)}
    return page | {"first_id": first, "last_id": last}


def _error_style(endpoint: Endpoint, response: StoredResponse) -> ErrorStyle:
    return endpoint.error_style_in(PROFILES[response.head.request["profile"]])


def _headers(response: StoredResponse, subscription: StoredSubscription) -> dict[str, str]:
    applied = min(job.max_tokens for job in response.head.jobs)
    return {
        "x-max-tokens-applied": str(applied),
        **ignored_header(subscription.completion.request.ignored_parameters),
    }


def _add_route(
    method: str, path: str, serve: Callable[..., Awaitable[Response]], endpoint: Endpoint
) -> None:
    is_get = method == "GET"

    @takes_query(*(POSITION_QUERY if is_get else ()), lists=_INCLUDE if is_get else ())
    async def route(request: Request) -> Response:
        measure = RequestMeasure(f"{endpoint.name}.{serve.__name__}", exchange_of(request.scope))
        completions = services_of(request)[StoredCompletions]
        return await measure.until_response(request, serve(completions, request, endpoint, measure))

    router.add_route(path, route, methods=[method])


# Plain routes, which gateway.process.openapi.operations describes.
for _endpoint in ENDPOINTS:
    _path = f"{_endpoint.path}/{{completion_id}}"
    _add_route("GET", _path, StoredCompletions.get, _endpoint)
    _add_route("POST", f"{_path}/cancel", StoredCompletions.cancel, _endpoint)
_add_route("DELETE", f"{RESPONSES.path}/{{completion_id}}", StoredCompletions.delete, RESPONSES)


@router.get(
    f"{RESPONSES.path}/{{completion_id}}/input_items",
    summary="List the input of a kept response",
    tags=["Responses"],
)
async def list_input_items(
    request: Request,
    completion_id: Annotated[str, Path(description="The id of the response.")],
    after: Annotated[
        str | None, Query(description="Id of the last item of the page before.")
    ] = None,
    limit: PageSize = 20,
    order: Annotated[
        Literal["asc", "desc"], Query(description="`asc`: in the order of the conversation.")
    ] = "desc",
    include: Annotated[
        list[str] | None,
        Query(alias="include[]", description="Items have what their request has asked for."),
    ] = None,
) -> dict[str, Any]:
    """List the items of a response's input, also those of responses that it continues."""
    del include  # It has no effect: see `_INCLUDE`.
    wanted = PageRequest(after, limit, is_newest_first=order == "desc")
    return await services_of(request)[StoredCompletions].input_items(request, completion_id, wanted)
