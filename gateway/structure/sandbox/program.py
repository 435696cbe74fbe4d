"""Sandbox process that compiles client grammars and tries out chat templates.

    python -m gateway.structure.sandbox.program MEMORY_BYTES NICENESS CPU_SECONDS COMPILE_SECONDS

It reads orders from standard input and writes a verdict on each to standard output, until the input
ends. Memory is limited, and so is the CPU time for each task. The process exits when a task exceeds
a limit.
"""

import dataclasses
import os
import re
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Iterable
from typing import BinaryIO

from llguidance import LLTokenizer

from gateway.dialects.request import Structure, StructureKind, ToolUse
from gateway.structure.clients_lark import llguidance_grammars
from gateway.structure.constraint import Constraint, added_tokens, calls_grammar, to_grammar
from gateway.structure.errors import RefusedError
from gateway.structure.lark import HEADER_LINES, TokenIds
from gateway.structure.sandbox import messages
from gateway.structure.sandbox.messages import Order, Task, Template, Tokenizer, Verdict
from gateway.structure.sandbox.probe import probe
from gateway.structure.sandbox.trial import try_out
from gateway.structure.translate import to_lark

_MAX_TOKENIZERS = 4
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_LOAD_SECONDS = 20.0


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

    def _compile(self, task: Task) -> Verdict:
        if task.digest not in self._tokenizers:
            return Verdict(lacks_tokenizer=True)
        self._tokenizers.move_to_end(task.digest)
        tokenizer, token_ids = self._tokenizers[task.digest]
        constraint = messages.decode_constraint(task.constraint)
        try:
            grammar = to_grammar(constraint, token_ids)
            if constraint.structure is not None and not constraint.is_compound:
                self._probe_structure(constraint.structure, grammar, tokenizer)
            else:
                self._probe_parts(constraint, tokenizer, token_ids)
                self._probe(grammar, tokenizer, walks=False)
        except RefusedError as error:
            return Verdict(refusal=_placed(str(error), constraint), param=error.param)
        except (RecursionError, MemoryError):
            return Verdict(refusal="too complex")
        return Verdict(grammar=grammar)

    def _probe_parts(
        self, constraint: Constraint, tokenizer: LLTokenizer, token_ids: TokenIds
    ) -> None:
        """Probe each part: a walk through the whole grammar may see nothing but free text."""
        if constraint.structure is not None:
            structure = constraint.structure
            self._probe_structure(structure, to_lark(structure), tokenizer)
        if constraint.tool_use is not None:
            self._probe_tools(constraint.tool_use, tokenizer, token_ids)

    def _probe_structure(self, structure: Structure, grammar: str, tokenizer: LLTokenizer) -> None:
        """Probe a structure; an error names the first grammar in it that is invalid."""
        try:
            self._probe(grammar, tokenizer)
        except RefusedError:
            if structure.kind is StructureKind.LLGUIDANCE:
                grammars = llguidance_grammars(structure.source, structure.place)
                self._probe_each(grammars.items(), tokenizer)
            raise

    def _probe_tools(self, tool_use: ToolUse, tokenizer: LLTokenizer, token_ids: TokenIds) -> None:
        """Probe the calls of all tools; an error names the first tool that is invalid alone."""
        try:
            self._probe(calls_grammar(tool_use, token_ids), tokenizer)
        except RefusedError as error:
            calls = (
                (tool.place, calls_grammar(dataclasses.replace(tool_use, tools=[tool]), token_ids))
                for tool in tool_use.callable_tools
            )
            self._probe_each(calls, tokenizer)
            raise RefusedError(_unplaced(str(error)), param=tool_use.param) from None

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


def _placed(reason: str, constraint: Constraint) -> str:
    """Return a reason with the compiler's position mapped to the client's text, or left out."""
    found = _POSITION.match(reason)
    if found is None:
        return reason
    rest = _unplaced(reason)
    if constraint.structure is None or constraint.structure.kind is not StructureKind.LARK:
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
