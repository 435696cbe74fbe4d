"""Chat templates in the style of the model families, and chats for the tests of prompts."""

from pathlib import Path
from typing import Any

from contract.messages import ChatFormat, ContentFormat
from gateway.dialects.chat.messages import read_messages
from tests.support.stack import CHECKPOINT

FOLDER = Path(__file__).parent / "chat_templates"
SOURCES = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.jinja"))} | {
    "demo": (CHECKPOINT / "chat_template.jinja").read_text()
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TOOL = {
    "function": {
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "name": "weather",
    },
    "type": "function",
}
SYSTEM = {"role": "system", "content": "Be brief. "}
ASK = {"role": "user", "content": "Hi <b>& 'you'\n ☺ "}
ANSWER = {"role": "assistant", "content": " Hello "}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": f"call_{letter * 9}",
            "type": "function",
            "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'},
        }
        for letter, city in (("a", "Zürich"), ("b", "<Oslo>"))
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": f"call_{letter * 9}", "content": content}
    for letter, content in (("a", "sun"), ("b", [{"type": "text", "text": "rain"}]))
]
THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2\nis 4"}

_SENT: dict[str, list[dict[str, Any]]] = {
    "one": [ASK],
    "system": [SYSTEM, ASK],
    "turns": [SYSTEM, ASK, ANSWER, ASK],
    "calls": [ASK, CALLS, *RESULTS],
    "calls answered": [SYSTEM, ASK, CALLS, *RESULTS, ANSWER, ASK],
    "reasoning": [ASK, THOUGHT, ASK],
    "reasoning in content": [ASK, {"role": "assistant", "content": "<think>a</think>b"}, ASK],
    "parts": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}],
    "name": [{**ASK, "name": "ann"}],
    "developer": [{"role": "developer", "content": "Be kind."}, ASK],
    "developers": [SYSTEM, ASK, ANSWER, {"role": "developer", "content": "Be kind."}, ASK],
    "bad order": [ASK, ASK],
    "empty": [{"role": "user", "content": ""}],
}
CHATS = {name: read_messages(messages).messages for name, messages in _SENT.items()}


def form_of(name: str, **fields: Any) -> ChatFormat:
    """Return the chat format of a model with a template of SOURCES."""
    takes_parts = name in ("parts", "roles", "demo")
    known: dict[str, Any] = {
        "content_format": ContentFormat.PARTS if takes_parts else ContentFormat.STRING,
        "special_tokens": SPECIAL_TOKENS,
    }
    return ChatFormat(name, **(known | fields))
