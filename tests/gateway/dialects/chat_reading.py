"""Bodies of chats, read through the dialects as the API does it."""

from typing import Any

import pytest

from gateway.dialects.chat.request import ChatCompletionRequest, to_chat_generation_request
from gateway.dialects.profile import Profile
from gateway.dialects.request import ChatRequest, GenerationRequest
from gateway.dialects.wire import validate
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.reading import OPENAI

USER = {"role": "user", "content": "Hello"}
PNG = b"\x89PNG\r\n\x1a\n"
PNG_URI = "data:image/png;base64,iVBORw0KGgo="


def read_chat_body(
    body: dict[str, Any], profile: Profile = OPENAI, *, max_prompts: int = 1024
) -> GenerationRequest:
    """Read a body in a dialect."""
    wire = validate(ChatCompletionRequest, body)
    return to_chat_generation_request(wire, profile, max_prompts=max_prompts)


def read_chat(profile: Profile = OPENAI, /, **parameters: Any) -> GenerationRequest:
    """Read a plain chat with these parameters in a dialect."""
    return read_chat_body({"model": "m", "messages": [USER]} | parameters, profile)


def chat(profile: Profile = OPENAI, /, **parameters: Any) -> ChatRequest:
    """Return the part of such a request that only chats have."""
    request = read_chat(profile, **parameters)
    assert request.chat is not None
    return request.chat


def chat_refusal(profile: Profile = OPENAI, /, **parameters: Any) -> BadRequestError:
    """Return why a chat with these parameters is refused."""
    with pytest.raises(BadRequestError) as caught:
        read_chat(profile, **parameters)
    assert caught.value.content()
    return caught.value


def image(url: Any = PNG_URI, **more: Any) -> dict[str, Any]:
    """Return a part with an image."""
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(content: Any = "a") -> dict[str, Any]:
    """Return a part with a text."""
    return {"type": "text", "text": content}
