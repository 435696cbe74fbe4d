"""Tracing attributes of a generation request."""

import json
from typing import Any

from contract.tracing import (
    CHAT,
    GEN_AI_INPUT,
    GEN_AI_OPERATION,
    GEN_AI_PROVIDER,
    GEN_AI_REQUEST_CHOICES,
    GEN_AI_REQUEST_MAX_TOKENS,
    GEN_AI_REQUEST_MODEL,
    GEN_AI_REQUEST_STREAM,
    GEN_AI_RESPONSE_ID,
    GEN_AI_RESPONSE_MODEL,
    PROVIDER,
    TEXT_COMPLETION,
)
from gateway import tracing
from gateway.dialects.request import GenerationRequest
from gateway.generation.check import CheckedRequest


def note_request(checked: CheckedRequest, completion_id: str) -> None:
    """Set the generation attributes of the current request's span."""
    if not tracing.is_on():
        return
    request = checked.request
    attributes: dict[str, str | bool | int | float] = {
        GEN_AI_OPERATION: TEXT_COMPLETION if request.chat is None else CHAT,
        GEN_AI_PROVIDER: PROVIDER,
        GEN_AI_REQUEST_CHOICES: request.n,
        GEN_AI_REQUEST_MAX_TOKENS: checked.prepared.applied_max_tokens,
        GEN_AI_REQUEST_MODEL: checked.model,
        GEN_AI_REQUEST_STREAM: request.stream,
        GEN_AI_RESPONSE_ID: completion_id,
        GEN_AI_RESPONSE_MODEL: checked.card.model,
    }
    if tracing.shows_content():
        attributes[GEN_AI_INPUT] = json.dumps(_input(request))[: tracing.MOST_CONTENT]
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
