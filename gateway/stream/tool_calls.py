"""The tool calls in a completion's text, in OpenAI's shape."""

import secrets
from typing import Any

from gateway.structure.tools import parse_tool_calls

ID_BYTES = 12


def told_tool_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls that `text` contains, each with an id of its own. The text stays as it is."""
    return [
        {
            "id": f"call_{secrets.token_hex(ID_BYTES)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in parse_tool_calls(text)
    ]
