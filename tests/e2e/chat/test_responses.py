"""Responses of the real engine: enforced texts of tools, and a loop of calls."""

import re
from typing import Any

import pytest
from openai import OpenAI

from tests.support.stack import MODEL

pytestmark = pytest.mark.e2e

SYNTAX = "regex"
EXPRESSION = r"\*\*\* Begin Patch\n\+[a-z ]{3,12}\n\*\*\* End Patch\n"
TOOLS: list[Any] = [
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": SYNTAX, "definition": EXPRESSION},
    },
    {
        "type": "namespace",
        "name": "mcp",
        "description": "A server.",
        "tools": [
            {
                "type": "function",
                "name": "look",
                "parameters": {
                    "type": "object",
                    "properties": {"at": {"type": "integer", "minimum": 1, "maximum": 9}},
                    "required": ["at"],
                },
                "strict": True,
            }
        ],
    },
]
CHOICES: list[Any] = [
    {"type": "custom", "name": "apply_patch"},
    {"type": "function", "name": "look", "namespace": "mcp"},
]


def test_loop_of_forced_calls_matches_the_grammars_and_stays_in_the_cache(client: OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "Work. " * 60}]
    shares = []
    for turn in range(4):
        asked: dict[str, Any] = {
            "model": MODEL,
            "input": items,
            "tools": TOOLS,
            "tool_choice": CHOICES[turn % 2],
            "max_output_tokens": 200,
            "include": ["reasoning.encrypted_content"],
        }
        with client.responses.stream(**asked) as stream:
            *_, last = stream
        response: Any = last.response.to_dict(mode="json", warnings=False)  # type: ignore[union-attr]
        assert response["status"] == "completed"
        call = response["output"][-1]
        if turn % 2:
            assert (call["type"], call["name"], call["namespace"]) == (
                "function_call",
                "look",
                "mcp",
            )
            assert re.fullmatch(r'\{"at": ?[1-9]\}', call["arguments"])
        else:
            assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch")
            assert re.fullmatch(EXPRESSION, call["input"])
        usage = response["usage"]
        shares.append(usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"])
        output = {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "ok"}
        items += [*response["output"], output]
    assert min(shares[2:]) > 0.7
