"""Tool calls in OpenAI's format."""

from hashlib import blake2b
from typing import Any

from gateway.completions.structure.tools import parse_tool_calls

ID_BYTES = 12


def call_id(request_id: str, choice: int, call: int) -> str:
    """Return the id of a call. Every replay of the response produces the same id."""
    place = f"{request_id}:{choice}:{call}".encode()
    return f"call_{blake2b(place, digest_size=ID_BYTES).hexdigest()}"


def function_call(id_: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a whole call."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_calls_in(text: str, request_id: str, choice: int) -> list[dict[str, Any]]:
    """Return the calls in the text of a completion's choice. The text is not changed."""
    return [
        function_call(call_id(request_id, choice, index), call.name, call.arguments)
        for index, call in enumerate(parse_tool_calls(text))
    ]
