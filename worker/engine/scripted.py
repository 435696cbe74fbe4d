"""A deterministic scripted engine without a model.

It serves the fast tests and the gateway's benchmark. In each step all running sequences receive one
token, and steps have a constant pace. The next token is a function of all earlier tokens and the
seed, so that a completion can be resumed. In chats it reasons and calls tools (`scripted_chats`).
It proves nothing about vLLM.
"""

import asyncio
import json
import re
import signal
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer

from contract.adapters import FILES
from contract.messages import Feature, PoolingSupport
from worker.chat_format import (
    ParserFormat,
    chat_format,
    folder_special_tokens,
    folder_templates,
    given_template,
)
from worker.engine.base import (
    AdapterLimits,
    AdapterRejectedError,
    EngineAdapter,
    EngineDeadError,
    EngineInfo,
    EngineRequest,
    EngineStats,
    EngineStep,
    Held,
    InvalidRequestError,
    SequenceEnd,
    SequenceOutput,
    TokenScores,
)
from worker.engine.exactness import exactness_of
from worker.engine.scripted_audio import transcript
from worker.engine.scripted_chats import ANY_WORD, ChatWriter, ScriptedSession
from worker.engine.scripted_pooling import pooled
from worker.model_files import bos_token_id, context_window, eos_token_id
from worker.parsing.base import Parsers
from worker.parsing.own import THINKING_END, OwnParsers

_MASK = 2**64 - 1
_FOLLOWED_TOKENS = 4_096
"""A longer prompt is hashed as a whole, because an engine takes no time from its worker."""
_WORD = re.compile(r" [A-Za-z]{2,}")
_CHAT_FEATURES = [Feature.CHAT, Feature.TOOLS, Feature.REASONING]

OWN_PARSERS = ParserFormat(
    tool_parser="hermes",
    reasoning_parser="think",
    reasoning_start="<think>",
    reasoning_end="</think>",
)
"""Parsers that no engine provides: Hermes calls, and reasoning between these marks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The behavior of a scripted engine."""

    step_seconds: float = 0.0
    """Time between two steps; 0 steps as fast as possible."""
    prefill_seconds_per_token: float = 0.0
    max_sequences: int = 256
    kv_cache_tokens: int = 1_000_000
    context_window: int | None = None
    """None uses the model's."""
    completion_tokens: int | None = None
    """Tokens after which a sequence ends with the end-of-text token; None never emits it."""
    deadly_token_id: int | None = None
    """The engine dies when it reads a prompt with this token; None disables this."""
    dies_on_signal: bool = False
    """Whether SIGUSR1 to this process kills the engine instead of the process."""
    chat_template: Path | None = None
    """File with the chat template; None uses the model's."""
    sessions: list[ScriptedSession] = field(default_factory=list)
    """What the model answers in sessions of agents."""
    adapters: AdapterLimits | None = None
    """None runs no adapters."""
    can_sleep: bool = False
    pooling: PoolingSupport | None = None
    """Set to pool texts and generate none."""
    clip_seconds: int = 0
    """Set to transcribe audio of at most so many seconds."""
    claimed_features: list[Feature] = field(default_factory=list)
    """Features that the engine claims without implementing them, for tests of other components."""


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    state: int
    ready_at: float
    generated: int
    """Completion tokens, including earlier attempts."""
    plan: list[int]
    """First tokens of the completion; ANY_WORD marks the unplanned ones."""


class ScriptedEngine:
    """Continues every prompt with words of the model's vocabulary."""

    def __init__(self, folder: Path, script: Script) -> None:
        self._folder = folder
        self._script = script
        self._waiting: deque[_Running] = deque()
        self._running: dict[str, _Running] = {}
        self._work = asyncio.Event()
        self._next_step_at = 0.0
        self._dead = False
        self._adapters: set[EngineAdapter] = set()

    async def start(self) -> None:
        """Read the model's tokenizer and configuration."""
        content = (self._folder / "tokenizer.json").read_bytes()
        self._tokenizer = tokenizer = Tokenizer.from_buffer(content)
        self._words = [
            token_id
            for token_id in range(tokenizer.get_vocab_size())
            if _WORD.fullmatch(tokenizer.decode([token_id]))
        ]
        self.parsers: Parsers = OwnParsers(
            tokenizer, finds_reasoning=tokenizer.token_to_id(THINKING_END) is not None
        )
        config = json.loads((self._folder / "config.json").read_text())
        self._eos_token_id = eos_token_id(self._folder)
        self._writer = ChatWriter(tokenizer, self._eos_token_id, self._script.sessions)
        templates = folder_templates(self._folder)
        if self._script.chat_template is not None:
            templates = given_template(self._script.chat_template)
        chat = chat_format(templates, folder_special_tokens(self._folder), OWN_PARSERS)
        features = _CHAT_FEATURES if self._script.pooling is None else [Feature.CHAT]
        self.info = EngineInfo(
            name="scripted",
            context_window=self._script.context_window or context_window(self._folder),
            vocabulary_size=config["vocab_size"],
            max_sequences=self._script.max_sequences,
            kv_cache_tokens=self._script.kv_cache_tokens,
            tokenizer_json=content,
            bos_token_id=bos_token_id(self._folder),
            eos_token_ids=[self._eos_token_id],
            features=[
                *([] if chat is None else features),
                *([Feature.STRUCTURE] if self._script.clip_seconds else []),
                *self._script.claimed_features,
            ],
            adapters=self._script.adapters,
            can_sleep=self._script.can_sleep,
            chat=chat,
            chat_templates=templates,
            pooling=self._script.pooling,
            clip_seconds=self._script.clip_seconds,
            # What else could change its results is for tests only.
            exactness=exactness_of(
                {"engine": "scripted", "completion_tokens": str(self._script.completion_tokens)}
            ),
        )
        if self._script.dies_on_signal:
            # It remains after the engine is closed: without it the signal would end the process.
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.die)

    async def aclose(self) -> None:
        """Drop all sequences."""
        self._waiting.clear()
        self._running.clear()

    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Add the sequences of one job. Raises InvalidRequestError or EngineDeadError."""
        if self._dead:
            raise EngineDeadError("the scripted engine died as configured")
        for request in requests:
            self._check(request)
            self._add(request)

    def _add(self, request: EngineRequest) -> None:
        prompt, output = request.prompt_token_ids, request.output_token_ids
        # Another text with each adapter.
        first = 0 if request.adapter is None else int(request.adapter.digest[:16], 16)
        first ^= zlib.crc32(request.audio)
        if len(prompt) > _FOLLOWED_TOKENS:
            state = _follow(first, hash(tuple(prompt)))
        else:
            state = reduce(_follow, prompt, first)
        plan = [] if request.pooling else self._plan(request, _draw(request, state))
        state = reduce(_follow, output, state)
        prefill = self._script.prefill_seconds_per_token * (len(prompt) + len(output))
        ready_at = asyncio.get_running_loop().time() + prefill
        self._waiting.append(_Running(request, state, ready_at, len(output), plan))
        self._work.set()

    def _plan(self, request: EngineRequest, draw: int) -> list[int]:
        if request.sampling.allowed_token_ids:
            return []
        if request.audio:
            return transcript(self._tokenizer, request, self._eos_token_id)
        return self._writer.plan(request.prompt_token_ids, grammar=request.grammar, seed=draw)

    async def abort(self, sequence_ids: Sequence[str]) -> None:
        """End sequences immediately, without further output. Unknown ids are ignored."""
        gone = set(sequence_ids)
        for sequence_id in gone:
            self._running.pop(sequence_id, None)
        self._waiting = deque(each for each in self._waiting if each.request.id not in gone)

    async def load_adapter(self, adapter: EngineAdapter) -> None:
        """Load an adapter. Raises AdapterRejectedError if its files are missing."""
        if not all((Path(adapter.folder) / name).is_file() for name in FILES):
            raise AdapterRejectedError(f"{adapter.folder} lacks a file")
        self._adapters.add(adapter)

    async def unload_adapter(self, adapter: EngineAdapter) -> None:
        """Unload an adapter."""
        self._adapters.remove(adapter)

    async def step(self) -> EngineStep:
        """Wait for the outputs of the next step. Raises EngineDeadError."""
        while not self._dead:
            if not (self._running or self._waiting):
                self._work.clear()
                await self._work.wait()
            await self._keep_pace()
            self._admit()
            outputs = self._sample()
            if (outputs or self._running) and not self._dead:
                # Without outputs while it processes prompts, as vLLM after a chunk of a prompt.
                return EngineStep(outputs, self._stats())
        raise EngineDeadError("the scripted engine died as configured")

    async def read_cache(self, _held: Held, /) -> None:
        """Note nothing: the engine has no cache."""

    async def sleep(self) -> None:
        """Free nothing: the engine has no weights. Raises EngineDeadError."""
        if self._dead:
            raise EngineDeadError("the scripted engine died as configured")

    async def wake(self) -> None:
        """Continue. Raises EngineDeadError."""
        await self.sleep()

    def die(self) -> None:
        """Fail like an engine whose process was killed."""
        self._dead = True
        self._work.set()

    def _check(self, request: EngineRequest) -> None:
        prompt, size = request.prompt_token_ids, self.info.vocabulary_size
        if not prompt:
            raise InvalidRequestError("The prompt must not be empty.")
        if request.adapter is not None and request.adapter not in self._adapters:
            raise InvalidRequestError("The adapter is not loaded.")
        known = prompt + request.output_token_ids
        if not (min(known) >= 0 and max(known) < size):
            raise InvalidRequestError(f"Token ids must be between 0 and {size - 1}.")
        if len(prompt) >= self.info.context_window + (request.pooling is not None):
            raise InvalidRequestError(
                f"The prompt must be shorter than the context window of "
                f"{self.info.context_window} tokens. Given: {len(prompt)}"
            )

    async def _keep_pace(self) -> None:
        now = asyncio.get_running_loop().time()
        self._next_step_at = max(self._next_step_at + self._script.step_seconds, now)
        await asyncio.sleep(self._next_step_at - now)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._script.max_sequences:
            sequence = self._waiting.popleft()
            self._running[sequence.request.id] = sequence

    def _sample(self) -> list[SequenceOutput]:
        now = asyncio.get_running_loop().time()
        ready = [each for each in self._running.values() if each.ready_at <= now]
        deadly = self._script.deadly_token_id
        if deadly is not None and any(deadly in each.request.prompt_token_ids for each in ready):
            self.die()
            return []
        outputs = [self._advance(each) for each in ready]
        for output in outputs:
            if output.end is not None:
                del self._running[output.sequence_id]
        return outputs

    def _advance(self, sequence: _Running) -> SequenceOutput:
        request = sequence.request
        draw = _draw(request, sequence.state)
        if request.pooling is not None and self._script.pooling is not None:
            result = pooled(request, self._script.pooling, seed=draw)
            return SequenceOutput(request.id, [], SequenceEnd.STOP, cached_tokens=0, pooled=result)
        sequence.generated += 1
        token_id = self._next_token(sequence, draw)
        sequence.state = _follow(sequence.state, token_id)
        is_first = sequence.generated == len(request.output_token_ids) + 1
        end = self._end(sequence, token_id)
        is_stop_token = end is SequenceEnd.STOP and token_id != self._eos_token_id
        return SequenceOutput(
            request.id,
            [token_id],
            end,
            token_id if is_stop_token else None,
            None if request.logprobs is None else [self._score(token_id, draw, request.logprobs)],
            self._score_prompt(request) if is_first else None,
            0 if is_first else None,
            len(request.prompt_token_ids) if is_first else None,
            # The script gives every token the highest score.
            [1] * (len(request.prompt_token_ids) - 1) if is_first else None,
        )

    def _next_token(self, sequence: _Running, draw: int) -> int:
        spec = sequence.request.sampling
        so_far, plan = sequence.generated, sequence.plan
        planned = plan[so_far - 1] if so_far <= len(plan) else ANY_WORD
        if planned not in (ANY_WORD, self._eos_token_id):
            return planned
        if self._is_over(so_far, sequence) and not spec.ignore_eos:
            return self._eos_token_id
        words = self._words
        if spec.allowed_token_ids:
            words = spec.allowed_token_ids
        elif so_far <= spec.min_tokens and spec.stop_token_ids:
            words = [each for each in words if each not in spec.stop_token_ids]
        return words[draw % len(words)]

    def _is_over(self, so_far: int, sequence: _Running) -> bool:
        """Whether the text ends with the token at this position."""
        if so_far <= sequence.request.sampling.min_tokens:
            return False
        plan, wanted = sequence.plan, self._script.completion_tokens
        if so_far <= len(plan):
            return plan[so_far - 1] == self._eos_token_id
        return wanted is not None and so_far >= wanted

    def _end(self, sequence: _Running, token_id: int) -> SequenceEnd | None:
        request = sequence.request
        tokens = len(request.prompt_token_ids) + sequence.generated
        is_eos = token_id == self._eos_token_id and not request.sampling.ignore_eos
        if is_eos or token_id in request.sampling.stop_token_ids:
            return SequenceEnd.STOP
        if sequence.generated >= request.max_tokens or tokens >= self.info.context_window:
            return SequenceEnd.LENGTH
        return None

    def _score(self, token_id: int, draw: int, alternatives: int) -> TokenScores:
        logprob = -0.25 - (draw >> 8) % 1024 / 512
        others = [self._words[(draw + 1 + i) % len(self._words)] for i in range(alternatives - 1)]
        return [(token_id, logprob)] + [
            (other, logprob - 0.5 * (i + 1)) for i, other in enumerate(others) if other != token_id
        ]

    def _score_prompt(self, request: EngineRequest) -> list[TokenScores] | None:
        if request.prompt_logprobs is None:
            return None
        scores = []
        state = 0
        for before, token_id in pairwise(request.prompt_token_ids):
            state = _follow(state, before)
            scores.append(self._score(token_id, _mix(state), request.prompt_logprobs))
        return scores

    def _stats(self) -> EngineStats:
        used = sum(
            len(each.request.prompt_token_ids) + each.generated for each in self._running.values()
        )
        usage = min(used / self._script.kv_cache_tokens, 1.0)
        return EngineStats(len(self._running), len(self._waiting), usage)


def _draw(request: EngineRequest, state: int) -> int:
    return _mix(state ^ (0 if request.sampling.is_greedy else request.seed))


def _follow(state: int, token_id: int) -> int:
    return (state * 6364136223846793005 + token_id + 1442695040888963407) & _MASK


def _mix(value: int) -> int:
    """Mix the bits of a 64-bit number (the finalizer of SplitMix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
