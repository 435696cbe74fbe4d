"""Sandbox process that compiles client grammars and tries out chat templates.

    python -m gateway.completions.structure.sandbox.program \
        MEMORY_BYTES NICENESS CPU_SECONDS COMPILE_SECONDS

It reads orders from standard input and writes a verdict on each to standard output, until the input
ends. Memory is limited, and so is the CPU time for each task. The process exits when a task exceeds
a limit.
"""

import dataclasses
import os
import random
import re
import resource
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from contract.grammar import MAX_GRAMMAR_CHARACTERS, PARSER_LIMITS
from gateway.completions.prompt.templates.template import (
    ChatTemplate,
    RefusedMessagesError,
    TooLongError,
    WrongTemplateError,
)
from gateway.completions.structure.clients_lark import llguidance_grammars
from gateway.completions.structure.constraint import (
    Constraint,
    added_tokens,
    calls_grammar,
    to_grammar,
)
from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.lark import HEADER_LINES, TokenIds
from gateway.completions.structure.sandbox import messages
from gateway.completions.structure.sandbox.messages import (
    CompileTask,
    Order,
    Template,
    Tokenizer,
    Verdict,
)
from gateway.completions.structure.schemas import Schemas
from gateway.completions.structure.translate import to_lark
from gateway.dialects.request import Structure, StructureKind, ToolUse

_MAX_CHARACTERS: Final = 1_000_000
_TURNS: Final = 64
_WORDS: Final = "a few words " * 20
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
_CALL: Final = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": {"x": "y"}},
}

LIMITS: Final = LLParserLimits(**PARSER_LIMITS)
_MAX_REASON_CHARACTERS = 300
_REGEX_ERROR = "error: "
_SCHEMA_ERROR = "failed to compile JSON schema: "
_MAX_STEPS = 96
_WALK_SECONDS = 0.15
"""CPU time after which a walk ends."""
_MAX_STEP_SECONDS = 0.02
_NOTABLE_STEP_SECONDS = 0.002
_MAX_GROWTH = 4
"""Maximum ratio of the second half's time to the first half's: some grammars never stop growing."""
_MAX_TOKENIZERS = 4
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_LOAD_SECONDS = 20.0


def try_out(source: str) -> None:
    """Compile a template and render sample conversations. Raise RefusedError if it is invalid.

    Whether the template accepts a conversation does not matter: templates reject what their models
    do not support.
    """
    try:
        template = ChatTemplate(source)
    except WrongTemplateError as error:
        raise RefusedError(str(error)) from None
    for variables in _conversations():
        try:
            template.render(variables, now=datetime.now(UTC), most_characters=_MAX_CHARACTERS)
        except TooLongError:
            raise RefusedError("its text for a short conversation is too long") from None
        except RefusedMessagesError:
            continue


def _conversations() -> list[Mapping[str, Any]]:
    turn = [{"role": "user", "content": _WORDS}, {"role": "assistant", "content": _WORDS}]
    called: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "b", "tool_call_id": "call_1", "name": "f"},
    ]
    parts: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}
    ]
    asked: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
        ([{"role": "system", "content": "a"}, *turn * _TURNS, turn[0]], None),
        (called, [_TOOL]),
        (parts, None),
    ]
    return [
        {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        for messages, tools in asked
    ]


def probe(
    grammar: str, tokenizer: LLTokenizer, *, most_compile_seconds: float, walks: bool = True
) -> None:
    """Compile a grammar and, with `walks`, try it out.

    Raises RefusedError if the grammar is invalid or too complex. Limits are in CPU time, so that a
    busy machine causes no rejections.
    """
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise RefusedError(f"the grammar must have at most {MAX_GRAMMAR_CHARACTERS} characters")
    start = time.process_time()
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise RefusedError(_reason(matcher.get_error()))
    if time.process_time() - start > most_compile_seconds:
        raise RefusedError("too complex: it takes too long to compile")
    if walks:
        _walk(matcher, random.Random(_MAX_STEPS), tokenizer)  # noqa: S311 - no secret


def _walk(matcher: LLMatcher, choice: random.Random, tokenizer: LLTokenizer) -> None:
    steps: list[float] = []
    while len(steps) < _MAX_STEPS and sum(steps) < _WALK_SECONDS:
        began = time.process_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise RefusedError(_why_it_stopped(matcher, is_first=not steps))
        if matcher.is_stopped():
            return
        matcher.consume_token(_picked(mask, choice, tokenizer))
        steps.append(time.process_time() - began)
        if steps[-1] > _MAX_STEP_SECONDS:
            raise RefusedError("too complex: a step takes too long")
    half = len(steps) // 2
    later = sum(steps[half:])
    if later > max(_NOTABLE_STEP_SECONDS * half, _MAX_GROWTH * sum(steps[:half])):
        raise RefusedError("too complex: the time per step keeps growing")


def _why_it_stopped(matcher: LLMatcher, *, is_first: bool) -> str:
    reason = _reason(matcher.get_error())
    if is_first and reason.startswith("NoExtension"):
        return "it matches no text"
    return f"too complex: {reason}"


def _picked(mask: int, choice: random.Random, tokenizer: LLTokenizer) -> int:
    """Return the first allowed token from a random position; the end token only if forced."""
    unfinished = mask
    for token in tokenizer.eos_tokens:
        unfinished &= ~(1 << token)
    mask = unfinished or mask
    rotated = mask >> (place := choice.randrange(tokenizer.vocab_size))
    if rotated:
        return place + (rotated & -rotated).bit_length() - 1
    return (mask & -mask).bit_length() - 1


def _reason(error: str) -> str:
    """Return the useful part of llguidance's message: its first line, or the one about a regex."""
    lines = error.split("\n")
    detail = next((line for line in lines if line.startswith(_REGEX_ERROR)), None)
    if detail is not None:
        return f"invalid regular expression: {detail.removeprefix(_REGEX_ERROR)}"
    return lines[0].strip()[:_MAX_REASON_CHARACTERS]


class Compiler:
    """Carries out orders and caches tokenizers."""

    def __init__(self, *, cpu_seconds: float, most_compile_seconds: float) -> None:
        self._cpu_seconds = cpu_seconds
        self._most_compile_seconds = most_compile_seconds
        self._tokenizers: OrderedDict[str, tuple[LLTokenizer, TokenIds]] = OrderedDict()

    def run(self, order: Order) -> Verdict:
        """Carry out an order. The process exits if the order uses too much CPU time."""
        try:
            if isinstance(order, Tokenizer):
                signal.setitimer(signal.ITIMER_PROF, _LOAD_SECONDS)
                return self._load(order)
            signal.setitimer(signal.ITIMER_PROF, self._cpu_seconds)
            return _tried(order) if isinstance(order, Template) else self._compile(order)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _load(self, order: Tokenizer) -> Verdict:
        tokenizer = LLTokenizer(
            order.file.decode(),
            n_vocab=order.vocabulary_size or None,
            eos_token=order.eos_token_ids or None,
        )
        self._tokenizers[order.digest] = tokenizer, added_tokens(order.file)
        if len(self._tokenizers) > _MAX_TOKENIZERS:
            self._tokenizers.popitem(last=False)
        return Verdict()

    def _compile(self, task: CompileTask) -> Verdict:
        if task.digest not in self._tokenizers:
            return Verdict(lacks_tokenizer=True)
        self._tokenizers.move_to_end(task.digest)
        tokenizer, token_ids = self._tokenizers[task.digest]
        constraint = messages.decode_constraint(task.constraint)
        try:
            try:
                return self._compiled(constraint, tokenizer, token_ids)
            except RefusedError as error:
                if error.is_final or not constraint.has_lenient:
                    raise
                # Together, schemas may be too complex.
                lenient = dataclasses.replace(constraint, enforces_lenient=False)
                return self._compiled(lenient, tokenizer, token_ids)
        except RefusedError as error:
            refusal = _in_source(str(error), constraint.structure)
            return Verdict(refusal=refusal, param=error.param)
        except (RecursionError, MemoryError):
            return Verdict(refusal="too complex")

    def _compiled(
        self, constraint: Constraint, tokenizer: LLTokenizer, token_ids: TokenIds
    ) -> Verdict:
        """Return the grammar after probing each part of it. Raises RefusedError.

        A walk through the whole grammar may see nothing but free text.
        """
        schemas = Schemas(enforces_lenient=constraint.enforces_lenient)
        if constraint.structure is not None:
            self._probe_structure(constraint.structure, schemas, tokenizer)
        if constraint.tool_use is not None:

            def calls_of(tool_use: ToolUse) -> str:
                return calls_grammar(tool_use, token_ids, schemas, constraint.call_format)

            self._probe_tools(constraint.tool_use, schemas, tokenizer, calls_of)
        grammar = to_grammar(constraint, token_ids, schemas)
        if constraint.is_compound:
            self._probe(grammar, tokenizer, walks=False)
        return Verdict(grammar=grammar, unenforced=schemas.unenforced)

    def _probe_structure(
        self, structure: Structure, schemas: Schemas, tokenizer: LLTokenizer
    ) -> None:
        """Probe a structure; an error names the first part of it that is invalid."""
        grammar = to_lark(structure, schemas)
        try:
            self._probe(grammar, tokenizer)
        except RefusedError:
            if structure.kind is StructureKind.LLGUIDANCE:
                grammars = llguidance_grammars(structure.source, structure.place)
                self._probe_each(grammars.items(), tokenizer)
            if not schemas.mend(self._error_finder(tokenizer)):
                raise
            self._probe(to_lark(structure, schemas), tokenizer)

    def _probe_tools(
        self,
        tool_use: ToolUse,
        schemas: Schemas,
        tokenizer: LLTokenizer,
        calls_of: Callable[[ToolUse], str],
    ) -> None:
        """Probe the calls of all tools; an error names the first tool that is invalid alone."""
        for tool in tool_use.callable_tools:
            if (grammar := tool.grammar) is not None:
                try:
                    self._probe(to_lark(grammar), tokenizer, walks=False)
                except RefusedError as error:
                    reason = _in_source(str(error), grammar)
                    raise RefusedError(reason, param=grammar.place) from None
        calls = calls_of(tool_use)
        try:
            self._probe(calls, tokenizer)
        except RefusedError as error:
            is_mended = schemas.mend(self._error_finder(tokenizer))
            for tool in () if is_mended else tool_use.callable_tools:
                alone = dataclasses.replace(tool_use, tools=[tool])
                try:
                    self._probe(calls_of(alone), tokenizer)
                except RefusedError as own_error:
                    if tool.grammar or not schemas.leave_out(tool.parameters):
                        place = tool.grammar.place if tool.grammar else tool.place
                        raise RefusedError(_unplaced(str(own_error)), param=place) from None
                    is_mended = True
            if not is_mended:
                raise RefusedError(_unplaced(str(error)), param=tool_use.param) from None
            self._probe(calls_of(tool_use), tokenizer)

    def _error_finder(self, tokenizer: LLTokenizer) -> Callable[[str], str]:
        def find_error(grammar: str) -> str:
            try:
                self._probe(grammar, tokenizer, walks=False)
            except RefusedError as error:
                return _unplaced(str(error)).removeprefix(_SCHEMA_ERROR)
            return ""

        return find_error

    def _probe_each(self, grammars: Iterable[tuple[str, str]], tokenizer: LLTokenizer) -> None:
        """Probe grammars by their places in the body. An error names the place."""
        for place, grammar in grammars:
            try:
                self._probe(grammar, tokenizer)
            except RefusedError as error:
                raise RefusedError(_unplaced(str(error)), param=place) from None

    def _probe(self, grammar: str, tokenizer: LLTokenizer, *, walks: bool = True) -> None:
        probe(grammar, tokenizer, most_compile_seconds=self._most_compile_seconds, walks=walks)


def _tried(order: Template) -> Verdict:
    try:
        try_out(order.source)
    except RefusedError as error:
        return Verdict(refusal=str(error))
    except MemoryError:
        return Verdict(refusal="it takes too much memory")
    return Verdict()


def _in_source(reason: str, structure: Structure | None) -> str:
    """Return a reason with the compiler's position mapped to the client's text, or left out."""
    found = _POSITION.match(reason)
    if found is None:
        return reason
    rest = _unplaced(reason)
    if structure is None or structure.kind is not StructureKind.LARK:
        return rest
    return f"line {max(int(found[1]) - HEADER_LINES, 1)}, column {found[2]}: {rest}"


def _unplaced(reason: str) -> str:
    found = _POSITION.match(reason)
    return reason if found is None else reason[found.end() :]


def serve(source: BinaryIO, target: BinaryIO, compiler: Compiler) -> None:
    """Carry out orders until the input ends."""
    while header := source.read(messages.LENGTH.size):
        order = messages.decode_order(source.read(*messages.LENGTH.unpack(header)))
        verdict = messages.encode(compiler.run(order))
        target.write(messages.LENGTH.pack(len(verdict)) + verdict)
        target.flush()


def main() -> None:
    """Set the limits of this process, signal that it is ready, and serve."""
    memory_bytes, niceness = int(sys.argv[1]), int(sys.argv[2])
    os.nice(niceness)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiler = Compiler(cpu_seconds=float(sys.argv[3]), most_compile_seconds=float(sys.argv[4]))
    ready = messages.encode(Verdict())
    sys.stdout.buffer.write(messages.LENGTH.pack(len(ready)) + ready)
    sys.stdout.buffer.flush()
    serve(sys.stdin.buffer, sys.stdout.buffer, compiler)


if __name__ == "__main__":
    main()
