"""vLLM's tool and reasoning parsers, selected by vLLM's names.

They receive strictly one token at a time: some of them return different results for larger steps.
The formats that Sluice parses itself take constant time per token; several of vLLM's parsers
process the whole call again with every token.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from tokenizers import Tokenizer

from contract.grammar import HERMES_PARSERS
from contract.messages import CallPiece, Parsing
from contract.outcomes import FinishReason
from worker.engine.base import InvalidRequestError
from worker.parsing.base import MakeParser, Parsed
from worker.parsing.hermes import HermesCalls
from worker.parsing.own import THINKING, OwnParser, OwnParsers

_MAX_REFERENCES = 8
_TYPE_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


class VllmParsers:
    """The parsers of one model.

    Args:
        tool_parser: vLLM's name of the tool parser; empty for none.
        reasoning_parser: vLLM's name of the reasoning parser; empty for none.
        tokenizer_json: The model's tokenizer.

    Both parsers were already checked against the model.
    """

    def __init__(self, tool_parser: str, reasoning_parser: str, tokenizer_json: bytes) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        # The model's output does not concern an operator and would flood the log token by token.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self._request = ChatCompletionRequest
        self._tokenizer = _Tokenizer(Tokenizer.from_buffer(tokenizer_json))
        self._classes = {
            (True, True): self._parser_class(tool_parser, reasoning_parser),
            (True, False): self._parser_class(tool_parser, ""),
            (False, True): self._parser_class("", reasoning_parser),
        }
        self._finds_own_calls = tool_parser in HERMES_PARSERS
        self._own: OwnParsers | None = None
        if {tool_parser} <= HERMES_PARSERS | {""} and {reasoning_parser} <= THINKING | {""}:
            self._own = OwnParsers(
                self._tokenizer.tokenizer,
                finds_calls=bool(tool_parser),
                finds_reasoning=bool(reasoning_parser),
            )

    def prepare(self, parsing: Parsing, opening: Sequence[int]) -> MakeParser | None:
        """Return a factory of parsers for a job's responses; None if there is nothing to parse.

        Raises InvalidRequestError.
        """
        if self._own is not None:
            return self._own.prepare(parsing, opening)
        has_hermes_calls = self._finds_own_calls or parsing.has_hermes_calls
        if not (has_hermes_calls and parsing.tools):
            return self.prepare_vllm(parsing, opening)
        make = self.prepare_vllm(msgspec.structs.replace(parsing, tools=[]), opening)
        names = parsing.text_tools
        if make is None:
            return lambda: OwnParser(None, HermesCalls(names))
        return lambda: _HermesAfterReasoning(make(), HermesCalls(names))

    def prepare_vllm(
        self, parsing: Parsing, opening: Sequence[int]
    ) -> "Callable[[], _VllmParser] | None":
        """Return what `prepare` returns, but always with vLLM's own parsers."""
        parser_class = self._classes.get((bool(parsing.tools), parsing.finds_reasoning))
        if parser_class is None:
            return None
        request = self._make_request(parsing.tools)
        make = partial(
            parser_class,
            self._tokenizer,
            request.tools,
            chat_template_kwargs=parsing.template_arguments,
        )
        return lambda: _VllmParser(make(), request, list(opening))

    def _make_request(self, tools: list[dict[str, Any]]) -> Any:
        try:
            return self._request(
                messages=[{"role": "user", "content": ""}],
                tools=list(map(_typed, tools)) or None,
                stream=True,
            )
        except ValueError as error:
            # The first line of Pydantic's message names the location.
            raise InvalidRequestError(
                f"The model's parser does not take the tools: {error}"[:500]
            ) from None

    def _parser_class(self, tool_parser: str, reasoning_parser: str) -> Any:
        from vllm.parser.parser_manager import ParserManager

        return ParserManager.get_parser(
            tool_parser_name=tool_parser or None,
            reasoning_parser_name=reasoning_parser or None,
            enable_auto_tools=True,
        )


class _VllmParser:
    """A vLLM parser of one response."""

    def __init__(self, parser: Any, request: Any, opening: list[int]) -> None:
        self._parser = parser
        self._request = request
        self._opening = opening
        self._has_arguments = True
        """Whether the last call has arguments."""
        self._last_call = -1
        has_reasoning = parser.reasoning_parser is not None
        self.is_reasoning = has_reasoning and not parser.is_reasoning_end(opening)
        """Whether the next token belongs to the reasoning."""

    def feed(self, token_id: int, text: str) -> Parsed:
        """Parse the next token and the text that it completes."""
        parsed = self._parse(text, [token_id])
        was_reasoning = self.is_reasoning
        if was_reasoning:
            # vLLM's public counts are wrong.
            self.is_reasoning = not self._parser._stream_state.reasoning_ended
        is_reasoning = was_reasoning and not parsed.content and not parsed.calls
        return parsed._replace(is_reasoning=is_reasoning)

    def finish(self, reason: FinishReason) -> Parsed:
        """Return held-back output; calls that `max_tokens` cut off are not completed."""
        parsed = self._parse("", [], is_finished=True)
        if reason is not FinishReason.STOP:
            return parsed._replace(calls=())
        return parsed._replace(calls=[*parsed.calls, *self._without_arguments()])

    def _parse(self, text: str, token_ids: list[int], *, is_finished: bool = False) -> Parsed:
        # Without the prompt, vLLM would never check whether the reasoning has ended.
        delta = self._parser.parse_delta(
            text, token_ids, self._request, prompt_token_ids=self._opening, finished=is_finished
        )
        if delta is None:
            return Parsed()
        calls = [] if not delta.tool_calls else self._complete(map(_piece, delta.tool_calls))
        return Parsed(delta.content or "", delta.reasoning or "", calls)

    def _complete(self, pieces: Iterable[CallPiece]) -> list[CallPiece]:
        """Return pieces with the empty arguments that some parsers leave out."""
        calls = list[CallPiece]()
        for piece in pieces:
            if piece.index != self._last_call:
                calls += self._without_arguments()
                self._last_call, self._has_arguments = piece.index, False
            self._has_arguments |= bool(piece.arguments)
            calls.append(piece)
        return calls

    def _without_arguments(self) -> list[CallPiece]:
        if self._has_arguments:
            return []
        self._has_arguments = True
        return [CallPiece(self._last_call, arguments="{}")]


class _HermesAfterReasoning:
    """A vLLM reasoning parser, followed by Sluice's own parser of calls."""

    def __init__(self, reasoning: _VllmParser, calls: HermesCalls) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def feed(self, token_id: int, text: str) -> Parsed:
        """Parse the next token and the text that it completes."""
        if not self._reasoning.is_reasoning:
            content, calls = self._calls.feed(text)
            return Parsed(content, calls=calls)
        parsed = self._reasoning.feed(token_id, text)
        content, calls = self._calls.feed(parsed.content)
        return Parsed(content, parsed.reasoning, calls, is_reasoning=not (content or calls))

    def finish(self, reason: FinishReason) -> Parsed:
        """Return held-back output."""
        parsed = Parsed()
        if self._reasoning.is_reasoning:
            parsed = self._reasoning.finish(reason)
        content, calls = self._calls.feed(parsed.content)
        return Parsed(content + self._calls.flush(), parsed.reasoning, calls)


class _Tokenizer:
    """The tokenizer methods that vLLM's parsers use, in an instance that no other thread uses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._vocabulary = tokenizer.get_vocab()
        added = tokenizer.get_added_tokens_decoder()
        special = {token_id: each.content for token_id, each in added.items() if each.special}
        self.all_special_ids = list(special)
        self.all_special_tokens = list(special.values())

    def get_vocab(self) -> Mapping[str, int]:
        return self._vocabulary

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: int | list[int], *, skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._vocabulary.get(tokens)
        return [self._vocabulary.get(each) for each in tokens]


def _typed(tool: Any) -> Any:
    """Return a tool whose parameters have their types.

    Some of vLLM's parsers convert what is not JSON by these types. They follow no references, and
    do not look at `const`.
    """
    match tool:
        case {"function": {"parameters": {"properties": dict(properties)} as schema} as function}:
            typed = {
                name: {**each, "type": sorted(types)}
                if isinstance(each, dict) and (types := _types(each, schema, 0))
                else each
                for name, each in properties.items()
            }
            return {**tool, "function": {**function, "parameters": {**schema, "properties": typed}}}
        case _:
            return tool


def _types(schema: Any, root: dict[str, Any], depth: int) -> set[str]:
    """Return the types that a schema permits; none if it does not say."""
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return set()
    given = schema.get("type", [])
    types = {each for each in ([given] if isinstance(given, str) else given) if each}
    values = [schema["const"]] if "const" in schema else schema.get("enum") or []
    types |= {_TYPE_NAMES[type(each)] for each in values}
    parts = [each for name in ("anyOf", "oneOf", "allOf") for each in schema.get(name) or ()]
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#/"):
        target: Any = root
        for key in ref[2:].split("/"):
            target = target.get(key) if isinstance(target, dict) else None
        parts.append(target)
    return types.union(*(_types(each, root, depth + 1) for each in parts))


def _piece(call: Any) -> CallPiece:
    function = call.function
    if function is None:
        return CallPiece(call.index)
    return CallPiece(call.index, function.name or "", function.arguments or "")
