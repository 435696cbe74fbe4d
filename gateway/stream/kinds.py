"""Response type of a request: chat, completion, or llama.cpp's own form of a completion."""

from gateway.dialects.request import GenerationRequest
from gateway.stream.chat_choice import ChatChoice
from gateway.stream.choice import Choice
from gateway.stream.native import NativeChoice
from gateway.stream.text_choice import TextChoice


def choice_type(request: GenerationRequest) -> type[Choice]:
    """Return the class that renders the choices of a request."""
    if request.is_native:
        return NativeChoice
    return TextChoice if request.chat is None else ChatChoice
