"""Check structures and tools of requests, and compile them into grammars for the engine."""

import dataclasses
import hashlib
from typing import Final

import msgspec
from cachetools import LRUCache

from gateway.completions.structure.constraint import Constraint
from gateway.completions.structure.limits import MAX_SOURCE_BYTES
from gateway.completions.structure.sandbox import messages
from gateway.completions.structure.sandbox.messages import CompileTask, Template, Verdict
from gateway.completions.structure.sandbox.pool import (
    SandboxDiedError,
    SandboxPool,
    SandboxSettings,
    TokenizerSource,
)
from gateway.dialects.request import Reasoning, Structure, ToolUse
from gateway.records.errors import InvalidGrammarError, OverloadedError

_MAX_CACHED_CHARACTERS: Final = 16 * 1024 * 1024
_TOO_EXPENSIVE: Final = Verdict(refusal="too complex: it takes too long or too much memory")


class GrammarChecker:
    """Compiles structures and tools into grammars, and caches the verdicts."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._pool = SandboxPool(settings)
        self._verdicts: LRUCache[bytes, Verdict] = LRUCache(
            _MAX_CACHED_CHARACTERS, lambda each: 256 + len(each.grammar) + len(each.refusal)
        )

    async def compile(
        self,
        structure: Structure | None,
        tool_use: ToolUse | None = None,
        *,
        tenant_id: str,
        tokenizer: TokenizerSource,
        reasoning: Reasoning | None = None,
        call_format: str = "hermes",
    ) -> Verdict:
        """Return the grammar for `GenerationJob.grammar`; empty if nothing is constrained.

        The verdict also has the places of what is not enforced of schemas that are not strict.
        With both a structure and tools, the text is either calls or matches the structure.
        `reasoning` describes the reasoning that ends before either of them begins. `call_format`
        is the name of the model's format of calls, in `formats`.

        Raises InvalidGrammarError, which names the place of the structure or of a tool's schema,
        TenantQueueFullError if too many structures of the tenant are waiting, and OverloadedError.
        """
        if structure is None and (tool_use is None or not tool_use.is_constraint):
            return Verdict()
        constraint = Constraint(structure, tool_use, reasoning, call_format)
        verdict = await self._verdict(constraint, tokenizer, tenant_id)
        if verdict == _TOO_EXPENSIVE and constraint.has_lenient:
            lenient = dataclasses.replace(constraint, enforces_lenient=False)
            verdict = await self._verdict(lenient, tokenizer, tenant_id)
        if not verdict.refusal:
            return verdict
        named = verdict.param
        if not named and structure is not None:
            named = structure.place
            if tool_use is not None:
                alone = Constraint(structure, None, reasoning)
                is_sound = not (await self._verdict(alone, tokenizer, tenant_id)).refusal
                named = tool_use.param if is_sound else named
        elif not named and tool_use is not None:
            named = tool_use.param
        raise InvalidGrammarError(f"'{named}' was rejected: {verdict.refusal}.", param=named)

    async def try_template(self, source: str) -> str:
        """Return why a chat template is unusable, or "" if it works. Raises OverloadedError."""
        try:
            verdict = await self._pool.try_out(Template(source))
        except SandboxDiedError as error:
            if error.is_tasks_fault:
                return _TOO_EXPENSIVE.refusal
            raise OverloadedError(
                "The model's chat template could not be checked in time.",
                retry_after_seconds=1.0,
            ) from None
        return verdict.refusal

    async def aclose(self) -> None:
        """Stop the sandboxes."""
        await self._pool.aclose()

    async def _verdict(
        self, constraint: Constraint, tokenizer: TokenizerSource, tenant_id: str
    ) -> Verdict:
        encoded = _encoded(constraint)
        if isinstance(encoded, Verdict):
            return encoded
        task = CompileTask(tokenizer.digest, encoded)
        key = hashlib.sha256(messages.encode(task)).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._judged(task, tokenizer, tenant_id)
            self._verdicts[key] = verdict
        return verdict

    async def _judged(
        self, task: CompileTask, tokenizer: TokenizerSource, tenant_id: str
    ) -> Verdict:
        try:
            return await self._pool.run(task, tokenizer, tenant_id=tenant_id)
        except SandboxDiedError as error:
            if error.is_tasks_fault:
                return _TOO_EXPENSIVE
            raise OverloadedError(
                "The grammar could not be compiled in time.", retry_after_seconds=1.0
            ) from None


def _encoded(constraint: Constraint) -> bytes | Verdict:
    """Return a constraint as the sandbox reads it, or why that is impossible."""
    try:
        encoded = messages.encode(constraint)
    except OverflowError:
        return Verdict(refusal="its integers must be from -2^63 to 2^64 - 1")
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return Verdict(refusal="it is nested too deeply, or a text is out of range")
    if len(encoded) > MAX_SOURCE_BYTES:
        size = len(encoded)
        return Verdict(refusal=f"it must have at most {MAX_SOURCE_BYTES} bytes. Given: {size}")
    return encoded
