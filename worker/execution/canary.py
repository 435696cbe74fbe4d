"""The canary: a fixed prompt that shows whether an engine still returns the results of its class.

An idle engine runs the prompt three times: cold, from its prefix cache, and resumed after some of
the tokens. It compares tokens and log-probabilities with each other, and with the reference of its
exactness class, which the first worker of the class has written. Each comparison has a tolerance:
in 16-bit arithmetic, the same tokens have other log-probabilities in a batch of another shape. The
same run repeated has almost none of this noise.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError
from tokenizers import Tokenizer

from common.tasks import Backoff
from contract import keys
from contract.sampling import SamplingSpec
from worker import telemetry
from worker.engine.base import (
    Engine,
    EngineDeadError,
    EngineRequest,
    InvalidRequestError,
    SequenceEnd,
    TokenScores,
)
from worker.execution.jobs import Probe, RunningJobs

_log = logging.getLogger(__name__)

TOKENS: Final = 16
"""Tokens of a run."""
RESUMED_AFTER: Final = 8
ALTERNATIVES: Final = 5
_LEAST_PROMPT, _LEAST_BLOCKS, _AFTER_BLOCKS = 64, 2, 4
"""Tokens of the prompt, blocks of it that the prefix cache has, and tokens after these blocks.

Some models look at the latest tokens only, which therefore must be in the cache.
"""
_RETRIES: Final = 60
"""Checks that other work prevents are repeated first after this fraction of the interval."""
_REFERENCE_SECONDS: Final = 90 * 86_400


class Phase(StrEnum):
    """A run of the prompt."""

    COLD = "cold"  # All of the prompt is processed.
    CACHED = "cached"  # Its first blocks are in the prefix cache.
    RESUMED = "resumed"  # After RESUMED_AFTER tokens, with nothing in the prefix cache.


class Outcome(StrEnum):
    """The result of a check."""

    EXACT = "exact"
    MISMATCH = "mismatch"
    DISTURBED = "disturbed"  # A job arrived.
    FAILED = "failed"  # The engine could not run the prompt, or Redis was unavailable.


class _DisturbedError(Exception):
    """A job arrived during a run."""


Reference = dict[Phase, list[TokenScores]]
"""The scores of each run's tokens: the token itself first, then the most likely ones."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reference).decode


class Tolerances(msgspec.Struct, frozen=True):
    """Differences of log-probabilities that are no mismatch."""

    same: float
    """Between equal runs on engines of one class."""
    other: float
    """Between the runs of one engine, in which batches have other shapes."""


FLOAT32: Final = Tolerances(same=0.0002, other=0.002)
COARSE: Final = Tolerances(same=0.05, other=0.5)
"""Of data types with 16 bits or fewer."""


def difference(expected: list[TokenScores], found: list[TokenScores], tolerance: float) -> str:
    """Return what differs first; empty if nothing does.

    After a near tie that is resolved differently, later tokens are not compared.
    """
    if len(expected) != len(found):
        return f"{len(found)} tokens instead of {len(expected)}"
    for position, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        known, seen = dict(theirs), dict(ours)
        for token_id in sorted(known.keys() | seen.keys()):
            # A token that is not among the most likely ones is no likelier than the last of these.
            one = known.get(token_id, min(known.values()))
            other = seen.get(token_id, min(seen.values()))
            is_open = (token_id not in known and other < one) or (
                token_id not in seen and one < other
            )
            if not (is_open or abs(one - other) <= tolerance):
                return (
                    f"at token {position}, the log-probability of {token_id} is {other:.4g} "
                    f"instead of {one:.4g}"
                )
        if theirs[0][0] != ours[0][0]:
            return ""
    return ""


@dataclass(eq=False)
class Canary:
    """Checks one engine at its start, and then once in an interval, while it is idle.

    Args:
        on_result: Called after each comparison with what differs; empty if nothing does.
    """

    redis: Redis
    model: str
    _: KW_ONLY
    interval_seconds: float
    on_result: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.interval_seconds / _RETRIES, self.interval_seconds)
        self._attached: Engine | None = None

    def attach(self, engine: Engine, jobs: RunningJobs) -> None:
        """Check this engine from now on: at once, unless it is the last one, which has slept."""
        self._engine, self._jobs = engine, jobs
        if engine is self._attached:
            jobs.is_exact = not self._different
            return
        self._attached, self._due_at = engine, 0.0
        self._backoff.reset()
        self._report("")
        self._prompt = _prompt_of(engine)
        is_float32 = engine.info.exactness.facts.get("dtype", "float32") == "float32"
        self.tolerances = FLOAT32 if is_float32 else COARSE

    async def watch(self) -> None:
        """Check the engine once, when that is due and no job runs. Raises EngineDeadError."""
        await asyncio.sleep(max(self._due_at - time.monotonic(), 0.0))
        await self._jobs.idle.wait()
        self._due_at = time.monotonic() + self._backoff.next_seconds()
        began, different, outcome = time.monotonic(), "", Outcome.FAILED
        try:
            different = await self._check()
            outcome = Outcome.MISMATCH if different else Outcome.EXACT
        except _DisturbedError:
            outcome = Outcome.DISTURBED
        except (RedisError, OSError) as error:
            _log.warning("Cannot compare the canary: %s", type(error).__name__)
        except InvalidRequestError as error:
            _log.warning("The engine rejects the canary: %s", error)
        finally:
            telemetry.canary(outcome, time.monotonic() - began)
        if outcome in (Outcome.EXACT, Outcome.MISMATCH):
            self._backoff.reset()
            self._due_at = time.monotonic() + self.interval_seconds
            self._report(different)

    def _report(self, different: str) -> None:
        self._different, self._jobs.is_exact = different, not different
        telemetry.INEXACT.set(bool(different))
        if different:
            _log.error("The engine returns other results than its class: %s", different)
        self.on_result(different)

    async def _check(self) -> str:
        """Run the prompt in all phases. Return what differs; empty if nothing does."""
        found: Reference = {}
        salts = {Phase.COLD: secrets.token_hex(8), Phase.RESUMED: secrets.token_hex(8)}
        for phase in Phase:
            salt = salts.get(phase, salts[Phase.COLD])
            first = found[Phase.COLD][:RESUMED_AFTER] if phase is Phase.RESUMED else []
            found[phase] = await self.run(phase, salt, [each[0][0] for each in first])
        cold = found[Phase.COLD]
        for phase, expected in ((Phase.CACHED, cold), (Phase.RESUMED, cold[RESUMED_AFTER:])):
            if different := difference(expected, found[phase], self.tolerances.other):
                return f"{phase}: {different}"
        reference = await self._reference(found)
        for phase, scores in found.items():
            if different := difference(reference[phase], scores, self.tolerances.same):
                return f"{phase}: {different}"
        return ""

    async def run(self, phase: Phase, salt: str, output: list[int]) -> list[TokenScores]:
        """Run the prompt once, after some tokens of output. Return the scores of the others."""
        if not self._jobs.idle.is_set():
            raise _DisturbedError
        request = EngineRequest(
            id=f"canary-{phase}-{secrets.token_hex(4)}",
            prompt_token_ids=self._prompt,
            max_tokens=TOKENS,
            sampling=SamplingSpec(seed=0, temperature=0.0, ignore_eos=True),
            seed=0,
            cache_salt=salt,
            logprobs=ALTERNATIVES,
            output_token_ids=output,
        )
        probe = self._jobs.probe = Probe(request.id)
        try:
            await self._engine.submit([request])
            return await _scores(probe)
        finally:
            self._jobs.probe = None
            if not probe.has_ended:
                with suppress(EngineDeadError):
                    await self._engine.abort([request.id])

    async def _reference(self, found: Reference) -> Reference:
        """Return the reference of the engine's class, which these results become if it has none."""
        key = keys.canary(self.model, self._engine.info.exactness.digest)
        await self.redis.set(key, _encode(found), nx=True)
        known: Any = await self.redis.get(key)
        await self.redis.expire(key, _REFERENCE_SECONDS)
        try:
            return found if known is None else _decode(known)
        except msgspec.MsgspecError:
            _log.warning("The canary's reference cannot be read: these results replace it")
            await self.redis.set(key, _encode(found), ex=_REFERENCE_SECONDS)
            return found


async def _scores(probe: Probe) -> list[TokenScores]:
    scores: list[TokenScores] = []
    while (output := await probe.outputs.get()) is not None:
        scores += output.logprobs or []
        probe.has_ended = output.end is not None
        if output.end is SequenceEnd.LENGTH:
            return scores
        if probe.has_ended:
            break
    raise _DisturbedError


def _prompt_of(engine: Engine) -> list[int]:
    """Return random numbers, and again the first ones, which a model continues from the beginning.

    So the results depend on all of the prefix cache, as those of a text in a language may not.
    """
    info, numbers = engine.info, [1]
    block = info.cache_block_tokens or _LEAST_PROMPT
    blocks = max(_LEAST_BLOCKS, _LEAST_PROMPT // block)
    tokens = max(min(blocks * block + _AFTER_BLOCKS, info.context_window - TOKENS), 1)
    while len(numbers) < tokens:
        numbers.append(numbers[-1] * 48_271 % (2**31 - 1))
    text = " ".join(str(each % 10_000) for each in numbers)
    again = tokens // 8
    ids = Tokenizer.from_buffer(info.tokenizer_json).encode(text).ids
    return ids[: tokens - again] + ids[:again]
