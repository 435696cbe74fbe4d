"""What kind of answer a request gets."""

from gateway.dialects.request import GenerationRequest
from gateway.stream.chat_choice import ChatChoice
from gateway.stream.choice import Choice
from gateway.stream.text_choice import TextChoice


def choice_type(request: GenerationRequest) -> type[Choice]:
    """Return what renders the choices of a request's answer."""
    return TextChoice if request.chat is None else ChatChoice
