"""Requests of all kinds whose answers are known, since each was answered once without any disturbance."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.chaos.transcript import Transcript
from tests.support.stack import CHECKPOINT, MODEL

STOP_AT = 0.6
"""How far into a text its stop string lies."""


@dataclass(slots=True)
class Recipe:
    """A request, and its answers by whether it is streamed."""

    name: str
    body: dict[str, Any]
    may_stream: bool = True
    expected: dict[bool, Transcript] = field(default_factory=dict)

    def body_of(self, *, stream: bool) -> dict[str, Any]:
        """Return the request's body."""
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return {"model": MODEL, **self.body, **options}


def _multibyte_token_ids() -> list[int]:
    """Return tokens that are, or hold, a part of a character of several bytes."""
    vocabulary: dict[str, int] = json.loads((CHECKPOINT / "tokenizer.json").read_text())["model"][
        "vocab"
    ]
    # In the byte-level alphabet these stand for the bytes that begin a character, or go on with it.
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
_STOPPED: Final = ("greedy, long", "seeded", "seeded, n", "bytes", "log-probabilities")
"""Recipes of which there is another one with a stop string."""


def first_recipes() -> list[Recipe]:
    """Return the recipes that need nothing else to be known."""
    return [
        *(Recipe(name, body) for name, body in _BODIES.items()),
        *(Recipe(name, body, may_stream=False) for name, body in _RANKED.items()),
    ]


def stopped_recipes(known: list[Recipe]) -> list[Recipe]:
    """Return recipes that end at a stop string, which lies across the tokens of a known text."""
    by_name = {recipe.name: recipe for recipe in known}
    found = []
    for name in _STOPPED:
        recipe = by_name[name]
        text = recipe.expected[False].choices[0].text
        at = round(len(text) * STOP_AT)
        # A word's beginning with the end of the word before: no token holds both.
        at = text.find(" ", at) if " " in text[at:] else at
        stop = text[at - 2 : at + 3]
        found.append(Recipe(f"{name}, stopped", {**recipe.body, "stop": [stop, "\x00never"]}))
    return found
