"""Chat responses of the scripted engine: reasoning if the prompt leaves it open, and tool calls.

A file may script whole sessions of agents: what the model answers at each turn.

A prompt counts as a chat if it ends with an opening or closing reasoning mark, as
the demo model's chats do. The prompt describes the tools in JSON, as chat templates write them.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from worker.parsing.hermes import CALL_END, CALL_START
from worker.parsing.own import THINKING_END, THINKING_START

ANY_WORD: Final = -1
"""Placeholder for a token that the engine chooses."""

_OPENING_TOKENS = 2
_THOUGHT_WORDS = 8, 48
_CONTENT_WORDS = 2, 12
_STRING_WORDS = 4, 40
_BROKEN_CHARACTERS = " 日本 — é"
"""Text in which some characters consist of several tokens."""
_TOOL = '{"type": "function", "function": '
_PIECE_TOKENS = 1_024
"""Tokens of a long prompt that are decoded once for all turns of a chat."""
_MOST_PIECES = 2_048

_read_json = json.JSONDecoder().raw_decode


class _Schema(msgspec.Struct):
    type: Any = None


class _Parameters(msgspec.Struct):
    properties: dict[str, _Schema] = {}


class _Tool(msgspec.Struct):
    name: str
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


class ScriptedCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a scripted turn."""

    name: str
    arguments: dict[str, Any] = {}


class ScriptedTurn(msgspec.Struct, forbid_unknown_fields=True):
    """What the model writes at one turn, in this order."""

    reasoning: str = ""
    """Written only where the prompt leaves reasoning open."""
    text: str = ""
    calls: list[ScriptedCall] = []


class ScriptedSession(msgspec.Struct, forbid_unknown_fields=True):
    """The turns of a session, which is recognized by a text in its prompts."""

    when: str
    turns: list[ScriptedTurn]
    """One for each assistant message of the session; later ones are not scripted."""


def read_sessions(file: Path) -> list[ScriptedSession]:
    """Read the sessions of a JSON file. Raises OSError or msgspec.DecodeError."""
    return msgspec.json.decode(file.read_bytes(), type=list[ScriptedSession])


@dataclass(eq=False)
class ChatWriter:
    """Plans responses, each as a function of its prompt and its seed."""

    _tokenizer: Tokenizer
    _eos_token_id: int
    _sessions: Sequence[ScriptedSession] = ()

    def __post_init__(self) -> None:
        self._start_id = self._tokenizer.token_to_id(THINKING_START)
        self._end_id: int | None = self._tokenizer.token_to_id(THINKING_END)
        self._piece = lru_cache(_MOST_PIECES)(self._decoded)

    def plan(self, prompt: Sequence[int], *, grammar: str, seed: int) -> list[int]:
        """Return the first tokens of a response, some of them ANY_WORD; none for a completion.

        A grammar counts as a forced tool call: the response immediately calls a tool that the
        grammar names.
        """
        opening, end_id = prompt[-_OPENING_TOKENS:], self._end_id
        is_open = self._start_id in opening
        if end_id is None or not (is_open or end_id in opening):
            return []
        starts = range(0, len(prompt), _PIECE_TOKENS)
        text = "".join([self._piece(tuple(prompt[at : at + _PIECE_TOKENS])) for at in starts])
        if (turn := self._turn(prompt, opening, text)) is not None:
            return self._scripted(turn, is_open=is_open)
        rng = Random(seed)  # noqa: S311 - it makes up words
        plan = [*self._reasoning(rng), end_id] if is_open else []
        tools = _tools(text, grammar)
        if tools:
            return plan + self._calls(tools, rng, is_forced=bool(grammar)) + [self._eos_token_id]
        return plan + self._tokens("\n\n") if is_open else plan

    def _decoded(self, piece: tuple[int, ...]) -> str:
        text: str = self._tokenizer.decode([*piece], skip_special_tokens=False)
        return text

    def _turn(
        self, prompt: Sequence[int], opening: Sequence[int], text: str
    ) -> ScriptedTurn | None:
        for session in self._sessions:
            if session.when in text:
                # Each message of the assistant begins with the token that begins the response.
                marks = {*opening} - {self._start_id, self._end_id}
                number = sum(token in marks for token in prompt) - 1
                return session.turns[number] if number < len(session.turns) else None
        return None

    def _scripted(self, turn: ScriptedTurn, *, is_open: bool) -> list[int]:
        plan = [*self._tokens(turn.reasoning), self._end_id or 0] if is_open else []
        written = [turn.text] if turn.text else []
        written += [
            CALL_START + msgspec.json.encode(call).decode() + CALL_END for call in turn.calls
        ]
        return [*plan, *self._tokens("\n".join(written)), self._eos_token_id]

    def _reasoning(self, rng: Random) -> list[int]:
        middle = self._tokens(_BROKEN_CHARACTERS)
        return [*_words(rng, _THOUGHT_WORDS), *middle, *_words(rng, _THOUGHT_WORDS)]

    def _calls(self, tools: list[_Tool], rng: Random, *, is_forced: bool) -> list[int]:
        if is_forced:
            return self._call(rng.choice(tools), rng)
        plan = [*_words(rng, _CONTENT_WORDS), *self._tokens("\n")]
        for _ in range(rng.randint(1, 2)):
            plan += [*self._call(rng.choice(tools), rng), *self._tokens("\n")]
        return plan

    def _call(self, tool: _Tool, rng: Random) -> list[int]:
        name = json.dumps(tool.name)
        plan = self._tokens(f'{CALL_START}{{"name": {name}, "arguments": {{')
        for number, (key, schema) in enumerate(tool.parameters.properties.items()):
            plan += self._tokens(f"{', ' if number else ''}{json.dumps(key)}: ")
            plan += self._value(schema, rng)
        return plan + self._tokens("}}" + CALL_END)

    def _value(self, schema: _Schema, rng: Random) -> list[int]:
        if schema.type == "string":
            end = self._tokens(f'{_BROKEN_CHARACTERS}\\n \\"}}{{"')
            return [*self._tokens('"'), *_words(rng, _STRING_WORDS), *end]
        return self._tokens(str(rng.randrange(10_000)))

    def _tokens(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids


def _words(rng: Random, bounds: tuple[int, int]) -> list[int]:
    return [ANY_WORD] * rng.randint(*bounds)


def _tools(prompt: str, grammar: str) -> list[_Tool]:
    """Return the functions that a prompt describes; with a grammar, only those that it names."""
    tools, at = list[_Tool](), prompt.find(_TOOL)
    while at >= 0:
        at += len(_TOOL)
        # Skip client text that is not a function.
        with suppress(ValueError, msgspec.ValidationError):
            tools.append(msgspec.convert(_read_json(prompt, at)[0], _Tool))
        at = prompt.find(_TOOL, at)
    return [tool for tool in tools if not grammar or tool.name in grammar]
