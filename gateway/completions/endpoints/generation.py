"""Generation endpoints, each with an `:estimate` endpoint for a dry run."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response
from opentelemetry.trace import get_current_span

from common import logs
from common import tracing as names
from common.tracing import PLAN
from gateway.completions.admission.call import Call, RequestReader, Session, with_fallbacks
from gateway.completions.admission.check import CheckedRequest, RequestChecker
from gateway.completions.admission.continuing import Continuations
from gateway.completions.admission.idempotency import (
    REPLAYED_HEADER,
    EarlierResponses,
    IdempotentRequest,
    read_idempotent_request,
)
from gateway.completions.admission.submit import RequestSubmitter, Submission
from gateway.completions.endpoints.event_ids import read_event_ids, read_last_event_id
from gateway.completions.endpoints.stored import StoredCompletions
from gateway.completions.sending.measuring import RequestMeasure
from gateway.completions.sending.respond import Recipient, ResponseSender
from gateway.completions.sending.subscription import InitialSubscription
from gateway.completions.stored.service import Responses
from gateway.completions.stored.store import StoredResponse
from gateway.dialects.endpoint import (
    ANTHROPIC_PREFIX,
    COUNTED_MESSAGES,
    ENDPOINTS,
    INVOCATIONS,
    NATIVE_ENDPOINTS,
    POOLING_ENDPOINTS,
    PREFIXED_MESSAGES,
    RESPONSES,
    SPEECH_ENDPOINTS,
    Endpoint,
)
from gateway.dialects.estimate_parameters import effective_parameters
from gateway.dialects.parameters import ignored_header
from gateway.dialects.request import GenerationRequest, ResponseForm
from gateway.dialects.stream_options import asked_tier
from gateway.http.allowances import UnpaidRequests
from gateway.http.exchange import exchange_of
from gateway.http.query import ignores_other_query
from gateway.http.services import services_of
from gateway.limits.refusal_log import Refusals
from gateway.platform import tracing
from gateway.platform.settings import Settings
from gateway.records.errors import ApiError

MOST_SESSION: Final = 256
"""Maximum characters of the id of a session or an agent in a trace."""
_LOGGED_SESSION: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Ids, but no addresses or other text, by which clients may name their sessions."""
COST_HEADER: Final = "x-include-cost"
"""`true` or `false` overrides the account's default for one request."""

router = APIRouter()


@dataclass(eq=False)
class Completions:
    """Serves clients that begin a completion or a chat, or estimate one."""

    _settings: Settings
    _reader: RequestReader
    _checker: RequestChecker
    _submitter: RequestSubmitter
    _earlier: EarlierResponses
    _stored: StoredCompletions
    _sender: ResponseSender
    _responses: Responses
    _unpaid: UnpaidRequests
    _refusals: Refusals
    _continuations: Continuations

    async def create(self, request: Request, endpoint: Endpoint) -> Response:
        """Authenticate, check, reserve, enqueue, and respond as a whole or with a stream.

        A client that resumes a stream, or repeats an Idempotency-Key, gets the original response.
        """
        measure = RequestMeasure(endpoint.name, exchange_of(request.scope), self._refusals)
        return await measure.until_response(request, self._create(request, endpoint, measure))

    async def estimate(self, request: Request, endpoint: Endpoint) -> Response:
        """Estimate a request without running it."""
        call = await self._reader.read(request, takes_models=endpoint.takes_models)
        call = await self._continuations.continued(call, endpoint)
        call, checked = await with_fallbacks(call, partial(self._estimated, endpoint=endpoint))
        return Response(
            msgspec.json.encode(self._estimate(call, checked)),
            media_type="application/json",
            headers=_applied_headers(checked),
        )

    async def _estimated(self, call: Call, *, endpoint: Endpoint) -> tuple[Call, CheckedRequest]:
        return call, await self._checker.check(call, endpoint)

    async def count(self, request: Request, endpoint: Endpoint) -> Response:
        """Return the tokens of a request's prompt."""
        exchange = exchange_of(request.scope)
        exchange.error_style = exchange.error_style or endpoint.error_style
        call = await self._reader.read(request, takes_models=endpoint.takes_models)
        call = await self._continuations.continued(call, endpoint)
        count = partial(self._checker.prompt_tokens, endpoint=endpoint)
        tokens, ignored = await with_fallbacks(call, count)
        counted: dict[str, Any] = {"input_tokens": tokens}
        if endpoint.form is ResponseForm.RESPONSES:
            counted = {"object": "response.input_tokens", **counted}
        content, headers = msgspec.json.encode(counted), ignored_header(ignored)
        return Response(content, media_type="application/json", headers=headers)

    async def _create(
        self, request: Request, endpoint: Endpoint, measure: RequestMeasure
    ) -> Response:
        if (position := read_last_event_id(request)) is not None:
            return await self._stored.continue_stream(request, endpoint, position, measure)
        exchange = exchange_of(request.scope)
        exchange.error_style = endpoint.error_style
        call = await self._reader.read(
            request,
            is_paid=True,
            has_native_path=endpoint.has_native_path,
            takes_file=endpoint.takes_file,
            takes_models=endpoint.takes_models,
        )
        if endpoint.form is ResponseForm.RESPONSES and call.body.get("stream") is True:
            exchange.stream_model = str(call.body.get("model") or "")
        endpoint = endpoint.of(call.body)
        measure.endpoint = endpoint.name
        idempotent = await read_idempotent_request(request, call)
        # These clients may read the response again, so they need a position in it.
        may_resume = idempotent is not None or call.body.get("background") is True
        has_ids = read_event_ids(request, default=may_resume)
        is_streamed = call.body.get("stream") is True
        recipient = Recipient(request, measure, is_streamed=is_streamed, has_ids=has_ids)
        return await with_fallbacks(
            call, partial(self._run, endpoint, recipient, idempotent=idempotent)
        )

    async def _run(
        self,
        endpoint: Endpoint,
        recipient: Recipient,
        call: Call,
        *,
        idempotent: IdempotentRequest | None,
    ) -> Response:
        """Run a request on its model. After an ApiError, the client has received nothing."""
        exchange = exchange_of(recipient.request.scope)
        tier = asked_tier(call.body) or call.principal.service_tier
        try:
            begun = await self._begin(endpoint, recipient, call, idempotent)
            if isinstance(begun, StoredResponse):
                self._unpaid.count(exchange, is_fault=True)
                return await self._replay(endpoint, begun, recipient, {REPLAYED_HEADER: "true"})
            tier = begun.checked.service_tier
            recipient = replace(recipient, is_streamed=begun.checked.request.stream)
            recipient.measure.accepted(begun.checked.card.model)
            # Each paid request allows one more failure.
            self._unpaid.use(exchange.caller, -1)
            return await self._respond(
                endpoint, begun, recipient, is_idempotent=idempotent is not None
            )
        except ApiError as error:
            error.concerns(call.choice.names[-1], tier)
            raise

    async def _begin(
        self,
        endpoint: Endpoint,
        recipient: Recipient,
        call: Call,
        idempotent: IdempotentRequest | None,
    ) -> Submission | StoredResponse:
        """Submit a request, unless its Idempotency-Key stands for an earlier response."""
        request_id = endpoint.new_id()
        if idempotent is not None:
            # Do not replay a stored response to a caller that may not use its model.
            call.require_model()
            earlier = await self._earlier.find(call, idempotent, request_id)
            if earlier is not None:
                return earlier
        try:
            submission = await self._submit(
                call, endpoint, recipient, request_id, idempotent=idempotent
            )
            if idempotent is not None and submission.checked.request.stream:
                await self._require_stored(submission)
        except BaseException:
            if idempotent is not None:
                # The client may repeat the request under its key.
                await self._earlier.release(idempotent, request_id)
            raise
        return submission

    async def _submit(
        self,
        call: Call,
        endpoint: Endpoint,
        recipient: Recipient,
        request_id: str,
        *,
        idempotent: IdempotentRequest | None,
    ) -> Submission:
        _note_session(call.session)
        call = await self._continuations.continued(call, endpoint)
        with tracing.span(PLAN):
            checked = await self._checker.check(call, endpoint)
        recipient.measure.checked_model = checked.card.model
        note_request(checked, request_id, shows_content=call.is_kept)
        asked = recipient.request.headers.get(COST_HEADER, "").lower()
        submission = await self._submitter.submit(
            call,
            checked,
            request_id=request_id,
            shows_cost=asked == "true" or (asked != "false" and call.principal.shows_cost),
            idempotent=idempotent,
        )
        record, completion = submission.settlement.record, submission.completion
        self._responses.kept.begin(record, completion, call.body, call.beside)
        self._responses.logs.begin(record, completion, call.body, call.beside)
        return submission

    async def _require_stored(self, submission: Submission) -> None:
        """Wait until every gateway can find a stream, so that its client never gets another one."""
        response, settlement = submission.response, submission.settlement
        if response is None or response.head.is_background:
            return
        try:
            await self._responses.require_stored(response.id, is_findable=True)
        except BaseException as error:
            self._responses.of(settlement).fail(error)
            if isinstance(error, ApiError):
                error.is_recorded = True
            raise

    async def _replay(
        self,
        endpoint: Endpoint,
        response: StoredResponse,
        recipient: Recipient,
        headers: Mapping[str, str],
    ) -> Response:
        """Send a stored response, or the status of one that runs in the background."""
        if response.head.is_background and not recipient.is_streamed:
            return await self._stored.status(endpoint, response, headers=headers)
        return await self._stored.resend(response, recipient, headers=headers)

    async def _respond(
        self,
        endpoint: Endpoint,
        submission: Submission,
        recipient: Recipient,
        *,
        is_idempotent: bool,
    ) -> Response:
        headers = {
            **submission.settlement.admission.headers,
            **_applied_headers(submission.checked),
        }
        responses, response = self._responses, submission.response
        if response is not None and response.head.is_background:
            responses.of(submission.settlement).leave()
            await responses.require_stored(response.id, is_findable=is_idempotent)
            return await self._replay(endpoint, response, recipient, headers)
        subscription = InitialSubscription(
            submission.completion, submission.generation, responses, submission.settlement
        )
        return await self._sender.send(subscription, recipient, headers)

    def _estimate(self, call: Call, checked: CheckedRequest) -> dict[str, Any]:
        """Return the usage that a request would have, its possible cost and its parameters."""
        request, settings = checked.request, self._settings
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
            "cost": self._cost(call, checked),
            "limits": {
                "max_prompts": settings.max_prompts,
                "max_body_bytes": self._reader.most_body_bytes,
                "max_waiting_prompts": settings.max_waiting_jobs_of_tenant,
                **{limits.scope.value: limits.limits.body() for limits in call.principal.limits},
            },
        }

    def _cost(self, call: Call, checked: CheckedRequest) -> dict[str, int]:
        """Return the cost of the prompt alone and the maximum total cost."""
        record, most = self._submitter.draft(call, checked, ""), checked.most
        return {
            "prompt_micros": record.cost_of(*most._replace(completion_tokens=0)),
            "max_micros": self._submitter.most_micros(call, record, most),
        }


def _applied_headers(checked: CheckedRequest) -> Mapping[str, str]:
    headers: dict[str, str] = {}
    if checked.request.pooling is None:
        headers["x-max-tokens-applied"] = str(checked.prepared.applied_max_tokens)
    if checked.alias is not None:
        headers |= checked.alias.headers
    if checked.prepared.cut_tokens:
        headers["x-prompt-truncated"] = str(checked.prepared.cut_tokens)
    return headers | ignored_header(checked.request.ignored_parameters)


def note_request(
    checked: CheckedRequest, completion_id: str, *, shows_content: bool = True
) -> None:
    """Set the generation attributes of the current request's span."""
    if not get_current_span().is_recording():
        return
    request = checked.request
    attributes: dict[str, str | bool | int | float] = {
        names.GEN_AI_OPERATION: _operation(request),
        names.GEN_AI_PROVIDER: names.PROVIDER,
        names.GEN_AI_REQUEST_CHOICES: request.n,
        names.GEN_AI_REQUEST_MAX_TOKENS: checked.prepared.applied_max_tokens,
        names.GEN_AI_REQUEST_MODEL: checked.model,
        names.GEN_AI_REQUEST_STREAM: request.stream,
        names.GEN_AI_RESPONSE_ID: completion_id,
        names.GEN_AI_RESPONSE_MODEL: checked.card.model,
    }
    if shows_content and tracing.shows_content():
        attributes[names.GEN_AI_INPUT] = json.dumps(_input(request))[: tracing.MOST_CONTENT]
    tracing.note(attributes)


def _note_session(session: Session) -> None:
    """Name an agent's session in log lines and traces, where its requests can be found by it."""
    if session == Session():
        return
    if _LOGGED_SESSION.fullmatch(session.id):
        logs.session_id.set(session.id)
    if get_current_span().is_recording():
        attributes = (names.GEN_AI_CONVERSATION, names.GEN_AI_AGENT, names.PARENT_AGENT)
        pairs = zip(attributes, session, strict=True)
        tracing.note({name: text[:MOST_SESSION] for name, text in pairs if text})


def _operation(request: GenerationRequest) -> str:
    if request.pooling is not None:
        return request.pooling.kind.value
    return names.TEXT_COMPLETION if request.chat is None else names.CHAT


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


def _add_route(path: str, serve: Callable[..., Awaitable[Response]], endpoint: Endpoint) -> None:
    @ignores_other_query
    async def route(request: Request) -> Response:
        return await serve(services_of(request)[Completions], request, endpoint)

    router.add_route(path, route, methods=["POST"])


# Plain routes: FastAPI's own resolve parameters and dependencies for every request, a fifth of the
# gateway's time per request. Their documentation is in gateway.process.openapi.operations.
_OTHERS: Final = (
    INVOCATIONS,
    PREFIXED_MESSAGES,
    *NATIVE_ENDPOINTS,
    *POOLING_ENDPOINTS,
    *SPEECH_ENDPOINTS,
)
for _endpoint in (*ENDPOINTS, *_OTHERS):
    _add_route(_endpoint.path, Completions.create, _endpoint)
for _prefix in ("", ANTHROPIC_PREFIX):
    _add_route(f"{_prefix}{COUNTED_MESSAGES.path}", Completions.count, COUNTED_MESSAGES)
for _endpoint in (*ENDPOINTS, *POOLING_ENDPOINTS):
    _add_route(f"{_endpoint.path}:estimate", Completions.estimate, _endpoint)
_add_route(f"{RESPONSES.path}/input_tokens", Completions.count, RESPONSES)
