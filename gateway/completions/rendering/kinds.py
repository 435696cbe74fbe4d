"""Response type of a request: chat, completion, or llama.cpp's own form of a completion."""

from gateway.completions.rendering.chat_choice import ChatChoice
from gateway.completions.rendering.choice import Choice
from gateway.completions.rendering.native import NativeChoice
from gateway.completions.rendering.text_choice import TextChoice
from gateway.dialects.request import GenerationRequest


def choice_type(request: GenerationRequest) -> type[Choice]:
    """Return the class that renders the choices of a request."""
    if request.is_native:
        return NativeChoice
    return TextChoice if request.chat is None else ChatChoice
