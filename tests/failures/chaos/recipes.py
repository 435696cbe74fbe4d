"""Requests of all kinds with known responses, recorded without any disturbance."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.failures.chaos.transcript import Transcript
from tests.support.stack import CHECKPOINT, MODEL

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
UNSERVED = "sluice-unserved"
"""A model that no worker serves any more."""
STOP_AT = 0.6
"""Position of the stop string in the text."""


@dataclass(slots=True)
class Recipe:
    """A request, and its responses by `stream`."""

    name: str
    body: dict[str, Any]
    may_stream: bool = True
    may_wait: bool = True
    """Whether it may run in the background."""
    path: str = COMPLETIONS
    reaches: frozenset[str] = frozenset()
    """What the response must contain, or the recipe proves nothing."""
    expected: dict[bool, Transcript] = field(default_factory=dict)

    def body_of(self, *, stream: bool) -> dict[str, Any]:
        """Return the request's body."""
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return {"model": MODEL, **self.body, **options}

    def check_reached(self) -> None:
        """Raise AssertionError if the response lacks what the recipe is for."""
        choices = self.expected[False].choices.values()
        had = {name for each in choices for name in _MEMBERS if getattr(each, name)}
        had |= {each.finish_reason or "" for each in choices}
        had |= {"several calls" for each in choices if len(each.calls) > 1}
        had |= {"log-probabilities" for each in choices if any(each.logprobs.values())}
        assert self.reaches <= had, f"{self.name}: {had}"


def _multibyte_token_ids() -> list[int]:
    """Return tokens that contain part of a multibyte character."""
    vocabulary: dict[str, int] = json.loads((CHECKPOINT / "tokenizer.json").read_text())["model"][
        "vocab"
    ]
    # In the byte-level alphabet these stand for the first and further bytes of such characters.
    found = [
        token_id
        for text, token_id in vocabulary.items()
        if text[0] in "ÃÎÐâð©¨¯¶»" and len(text) <= 2
    ]
    return sorted(found)[:100]


_SEEDED: Final = {"temperature": 1.0, "return_token_ids": True}
_GREEDY: Final = {"temperature": 0, "return_token_ids": True}

_BODIES: Final[Mapping[str, dict[str, Any]]] = {
    "greedy": {"prompt": "Once upon a time", "max_tokens": 100, **_GREEDY},
    "greedy, long": {"prompt": "The sea", "max_tokens": 240, "ignore_eos": True, **_GREEDY},
    "greedy, three alike": {"prompt": "A dog", "max_tokens": 60, "n": 3, **_GREEDY},
    "seeded": {"prompt": "In the morning", "max_tokens": 150, "seed": 11, **_SEEDED},
    "seeded, n": {"prompt": "A cat and", "max_tokens": 90, "n": 3, "seed": 12, **_SEEDED},
    "seeded, long": {
        "prompt": "It was",
        "max_tokens": 220,
        "ignore_eos": True,
        "seed": 13,
        **_SEEDED,
    },
    "several prompts": {
        "prompt": ["One", "Two and", "Three of them"],
        "max_tokens": 50,
        "n": 2,
        "seed": 14,
        **_SEEDED,
    },
    "ends by itself": {"prompt": "She said", "max_tokens": 300, "seed": 15, **_SEEDED},
    "log-probabilities": {
        "prompt": "My friend",
        "max_tokens": 80,
        "logprobs": 3,
        "seed": 16,
        **_SEEDED,
    },
    "echo": {"prompt": "We went", "max_tokens": 60, "echo": True, "seed": 17, **_SEEDED},
    "echo, log-probabilities": {
        "prompt": "They had a",
        "max_tokens": 60,
        "echo": True,
        "logprobs": 2,
        **_GREEDY,
    },
    "fallback": {
        "model": UNSERVED,
        "models": [MODEL],
        "prompt": "A long walk",
        "max_tokens": 120,
        "seed": 22,
        **_SEEDED,
    },
    "bytes": {
        "prompt": "Zoë",
        "max_tokens": 150,
        "seed": 18,
        "allowed_token_ids": _multibyte_token_ids(),
        **_SEEDED,
    },
    "bytes, log-probabilities": {
        "prompt": "Zürich",
        "max_tokens": 60,
        "seed": 19,
        "logprobs": 1,
        "allowed_token_ids": _multibyte_token_ids(),
        **_SEEDED,
    },
}
_RANKED: Final[Mapping[str, dict[str, Any]]] = {
    "best of": {
        "prompt": "A story",
        "max_tokens": 80,
        "best_of": 4,
        "n": 2,
        "seed": 20,
        **_SEEDED,
    },
    "best of, log-probabilities": {
        "prompt": "The end",
        "max_tokens": 60,
        "best_of": 3,
        "n": 1,
        "logprobs": 2,
        "seed": 21,
        **_SEEDED,
    },
}
_TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "take_note",
            "description": "Keep a text for later",
            "parameters": {
                "type": "object",
                "properties": {"title": {"type": "string"}, "text": {"type": "string"}},
                "required": ["title", "text"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
]
_NOTE: Final = {"type": "function", "function": {"name": "take_note"}}
_THINKS: Final = {"chat_template_kwargs": {"enable_thinking": True}}


def _messages(*texts: str) -> list[dict[str, str]]:
    """Return alternating messages of a user and an assistant."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


_HISTORY: Final = [
    {"role": "system", "content": "You take notes."},
    *_messages("Note this: Zoë is 5."),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "take_note", "arguments": '{"title": "", "text": "Zoë is 5"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    *_messages("And now this."),
]

_CHATS: Final[Mapping[str, tuple[dict[str, Any], set[str]]]] = {
    "chat": ({"messages": _messages("Hello"), "max_tokens": 100, **_GREEDY}, {"text"}),
    "chat, n": (
        {
            "messages": _messages("Hello", "Hello!", "Who are you?"),
            "max_tokens": 120,
            "n": 3,
            "seed": 31,
            **_SEEDED,
        },
        {"text"},
    ),
    "chat, bytes": (
        {
            "messages": _messages("Zürich"),
            "max_tokens": 120,
            "seed": 32,
            "allowed_token_ids": _multibyte_token_ids(),
            **_SEEDED,
        },
        {"text"},
    ),
    "chat, reasoning": (
        {"messages": _messages("Think"), "max_tokens": 160, "seed": 33, **_THINKS, **_SEEDED},
        {"reasoning", "text"},
    ),
    "chat, reasoning cut": (
        {
            "messages": _messages("Think"),
            "max_tokens": 12,
            "n": 2,
            "seed": 34,
            **_THINKS,
            **_SEEDED,
        },
        {"reasoning", "length"},
    ),
    "chat, reasoning hidden, log-probabilities": (
        {
            "messages": _messages("Think"),
            "max_tokens": 160,
            "include_reasoning": False,
            "logprobs": True,
            "seed": 35,
            **_THINKS,
            **_SEEDED,
        },
        {"text", "log-probabilities"},
    ),
    "chat, tools": (
        {"messages": _messages("Note this"), "tools": _TOOLS, "seed": 36, **_SEEDED},
        {"text", "calls", "tool_calls"},
    ),
    "chat, tools, n": (
        {"messages": _HISTORY, "tools": _TOOLS, "n": 3, "seed": 37, **_SEEDED},
        {"calls", "several calls"},
    ),
    "chat, tools, log-probabilities": (
        {
            "messages": _messages("Note it"),
            "tools": _TOOLS,
            "logprobs": True,
            "top_logprobs": 2,
            **_GREEDY,
        },
        {"calls", "log-probabilities"},
    ),
    "chat, tools, cut": (
        {
            "messages": _messages("Note all"),
            "tools": _TOOLS,
            "max_tokens": 60,
            "n": 2,
            "seed": 38,
            **_SEEDED,
        },
        {"calls", "length"},
    ),
    "chat, tools, reasoning": (
        {"messages": _messages("Think"), "tools": _TOOLS, "seed": 39, **_THINKS, **_SEEDED},
        {"reasoning", "text", "calls"},
    ),
    "chat, tool required": (
        {
            "messages": _messages("Think, and note it"),
            "tools": _TOOLS,
            "tool_choice": "required",
            "n": 2,
            "seed": 40,
            **_THINKS,
            **_SEEDED,
        },
        {"reasoning", "calls", "tool_calls"},
    ),
    "chat, tool named": (
        {
            "messages": _messages("Note this"),
            "tools": _TOOLS,
            "tool_choice": _NOTE,
            "seed": 41,
            **_SEEDED,
        },
        {"calls", "stop"},
    ),
    "chat, one call at most": (
        {
            "messages": _messages("Note this"),
            "tools": _TOOLS,
            "parallel_tool_calls": False,
            "seed": 42,
            **_SEEDED,
        },
        {"calls", "tool_calls"},
    ),
    "chat, functions": (
        {
            "messages": _messages("Note this"),
            "functions": [tool["function"] for tool in _TOOLS],
            "seed": 43,
            **_SEEDED,
        },
        {"calls", "function_call"},
    ),
}
_OTHERS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "message": (MESSAGES, {"messages": _messages("Hello"), "max_tokens": 90, "temperature": 0}),
    "response": (RESPONSES, {"input": "Hello", "max_output_tokens": 92, "temperature": 0}),
}
"""Requests in other dialects, for clients that read whole responses."""
_MEMBERS: Final = ("text", "reasoning", "calls")
_STOPPED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("greedy, long", "seeded", "seeded, n", "bytes", "log-probabilities", "chat, n"), "text"
    ),
    "chat, bytes": "text",
    "chat, reasoning": "reasoning",
    "chat, tools": "calls",
    "chat, tool required": "calls",
    "chat, tools, log-probabilities": "calls",
}
"""Recipes that have a variant with a stop string, and its position."""


def first_recipes() -> list[Recipe]:
    """Return the recipes that depend on no other response."""
    return [
        *(Recipe(name, body) for name, body in _BODIES.items()),
        *(Recipe(name, body, may_stream=False) for name, body in _RANKED.items()),
        *(
            Recipe(name, body, path=CHATS, reaches=frozenset(reaches))
            for name, (body, reaches) in _CHATS.items()
        ),
        *(
            Recipe(name, body, may_stream=False, may_wait=False, path=path)
            for name, (path, body) in _OTHERS.items()
        ),
    ]


def stopped_recipes(known: list[Recipe]) -> list[Recipe]:
    """Return the variants with a stop string, which spans tokens of a known text."""
    found = []
    for recipe in known:
        if (member := _STOPPED.get(recipe.name)) is None:
            continue
        choice = recipe.expected[False].choices[0]
        text = choice.calls[0].arguments if member == "calls" else getattr(choice, member)
        at = round(len(text) * STOP_AT)
        # The end of one word and the start of the next: no token holds both.
        at = text.find(" ", at) if " " in text[at:] else at
        stop = text[at - 2 : at + 3]
        body = {**recipe.body, "stop": [stop, "\x00never"]}
        found.append(Recipe(f"{recipe.name}, stopped", body, path=recipe.path))
    return found
