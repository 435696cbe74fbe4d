"""The playground: try a request with the rights of the session's key.

One script sends the form and shows the stream. Without scripts, the form runs chats and
completions, and the page shows the answer.
"""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec import json
from starlette.types import Message

from contract.messages import Feature
from gateway.accounts.routes_common import MAX_TEXT_CHARACTERS
from gateway.completions.endpoints.generation import COST_HEADER, Completions
from gateway.completions.endpoints.models import ModelList
from gateway.console.forms import Form, number
from gateway.console.routing import FORM, AnswerRoute, base_url, needs
from gateway.console.tables import pairs
from gateway.console.visitor import Visitor
from gateway.dialects.endpoint import CHATS, COMPLETIONS, Endpoint
from gateway.dialects.profile_choice import DIALECT_HEADER
from gateway.http.exchange import exchange_of
from gateway.http.services import AllServices
from gateway.records.scopes import Scope

HOME: Final = "/console/playground"
NUMBERS: Final = (
    ("max_tokens", "Maximum tokens", "1", "what is left"),
    ("n", "Choices", "1", "1"),
    ("temperature", "Temperature", "any", "1"),
    ("top_p", "Top p", "any", "1"),
    ("top_k", "Top k", "1", "all"),
    ("min_p", "Min p", "any", "0"),
    ("seed", "Seed", "1", "random"),
    ("presence_penalty", "Presence penalty", "any", "0"),
    ("frequency_penalty", "Frequency penalty", "any", "0"),
    ("repetition_penalty", "Repetition penalty", "any", "1"),
)
"""Parameters with fields of their own: name, label, step, and what an empty field stands for."""
FIRST: Final = {"max_tokens": "200", "stream": "on"}
_OWN_HEADERS: Final = {
    b"content-type": b"application/json",
    b"accept": b"application/json",
    DIALECT_HEADER.encode(): b"openai",
    COST_HEADER.encode(): b"true",
}
_OF_FORM: Final = (b"content-length", b"transfer-encoding", *_OWN_HEADERS)
"""Headers of a form that its request does not have."""

router = APIRouter(route_class=AnswerRoute, include_in_schema=False)

Generates = Annotated[Visitor, Depends(needs(Scope.COMPLETIONS))]


@router.api_route(HOME, methods=FORM)
async def playground(
    visitor: Generates,
    services: AllServices,
    model: Annotated[str, Query(max_length=MAX_TEXT_CHARACTERS)] = "",
) -> Response:
    """Show the form; without scripts, run its request and show the answer below the form."""
    form, answer = visitor.form, None
    if form.is_sent:
        endpoint = CHATS if form["endpoint"] == _path(CHATS) else COMPLETIONS
        own = _with_body(visitor.request, _body(form, endpoint))
        exchange_of(own.scope).session = visitor.principal
        response = await services[Completions].create(own, endpoint)
        answer = json.decode(response.body)
    listed = (await services[ModelList].list(visitor.principal))["data"]
    chosen = model or visitor.principal.default_model or ""
    return visitor.page(
        "playground.html",
        models=pairs(each["id"] for each in listed if each["task"] == "generate"),
        with_images=[each["id"] for each in listed if Feature.IMAGES in each["features"]],
        form=form or Form.of({**FIRST, "model": chosen}),
        numbers=NUMBERS,
        base_url=base_url(visitor.request),
        answer=answer,
    )


def _path(endpoint: Endpoint) -> str:
    return endpoint.path.removeprefix("/v1/")


def _body(form: Form, endpoint: Endpoint) -> dict[str, Any]:
    """Return the request that a form stands for."""
    body: dict[str, Any] = {"model": form["model"]}
    if endpoint is CHATS:
        said = (("system", form["system"]), ("user", form["prompt"]))
        messages = [{"role": role, "content": text} for role, text in said if text]
        body["messages"] = messages
    else:
        body["prompt"] = form["prompt"]
    body |= {name: number(form[name]) for name, *_ in NUMBERS if form[name]}
    stops = form["stop"].splitlines()
    return body | ({"stop": stops} if stops else {})


def _with_body(request: Request, body: dict[str, Any]) -> Request:
    """Return a request with another body, from the client of a request that was read."""
    content = json.encode(body)
    parts: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        return parts.pop() if parts else await request.receive()

    kept = [each for each in request.scope["headers"] if each[0] not in _OF_FORM]
    size = (b"content-length", str(len(content)).encode())
    headers = [*kept, *_OWN_HEADERS.items(), size]
    # Without the server's extensions: the connection would give the form that was read.
    return Request({**request.scope, "headers": headers, "extensions": {}}, receive)
