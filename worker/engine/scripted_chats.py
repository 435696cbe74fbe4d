"""Chat responses of the scripted engine: reasoning if the prompt leaves it open, and tool calls.

A prompt counts as a chat if it ends with an opening or closing reasoning mark, as
the demo model's chats do. The prompt describes the tools in JSON, as chat templates write them.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
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

_read_json = json.JSONDecoder().raw_decode


class _Schema(msgspec.Struct):
    type: Any = None


class _Parameters(msgspec.Struct):
    properties: dict[str, _Schema] = {}


class _Tool(msgspec.Struct):
    name: str
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


class ChatWriter:
    """Plans responses, each as a function of its prompt and its seed."""

    def __init__(self, tokenizer: Tokenizer, *, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_id = eos_token_id
        self._start_id = tokenizer.token_to_id(THINKING_START)
        self._end_id: int | None = tokenizer.token_to_id(THINKING_END)

    def plan(self, prompt: Sequence[int], *, grammar: str, seed: int) -> list[int]:
        """Return the first tokens of a response, some of them ANY_WORD; none for a completion.

        A grammar counts as a forced tool call: the response immediately calls a tool that the
        grammar names.
        """
        opening, end_id = prompt[-_OPENING_TOKENS:], self._end_id
        is_open = self._start_id in opening
        if end_id is None or not (is_open or end_id in opening):
            return []
        rng = Random(seed)  # noqa: S311 - it makes up words
        plan = [*self._reasoning(rng), end_id] if is_open else []
        tools = _tools(self._tokenizer.decode(prompt, skip_special_tokens=False), grammar)
        if tools:
            return plan + self._calls(tools, rng, is_forced=bool(grammar)) + [self._eos_token_id]
        return plan + self._tokens("\n\n") if is_open else plan

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
