"""Process with the worker's engine alone, which falls asleep, wakes, and resumes sequences.

`bench.gpu` starts it. The argument is JSON: `settings` of the worker, `rounds` of sleep (0 for
none), and `sequences`, `tokens` and `after` of the resumption, where `after` lists the numbers of
tokens after which all sequences are resumed. It prints a line of JSON for each result.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

from tokenizers import Tokenizer

from bench.gpu_usage import used_mib
from bench.scenarios import prompts
from contract.sampling import SamplingSpec
from worker.engine.base import EngineRequest
from worker.engine.vllm.engine import VllmEngine
from worker.settings import WorkerSettings

_WORDS: Final = 24
_SAMPLINGS: Final = (
    ("greedy", SamplingSpec(seed=0, temperature=0.0, ignore_eos=True)),
    ("seeded", SamplingSpec(seed=0, temperature=1.0, ignore_eos=True)),
)
"""The sequences have them in turn."""

Tokens = list[list[int]]
"""The tokens of each sequence."""


class Checks:
    """Runs sequences on one engine."""

    def __init__(self, settings: dict[str, Any], sequences: int, tokens: int) -> None:
        self._engine = VllmEngine(WorkerSettings(**settings))
        self._tokens = tokens
        self._texts = list(islice(prompts("engine checks", _WORDS), sequences))
        self._ids: Tokens = []
        self._runs = 0

    async def start(self) -> None:
        """Start the engine."""
        began = time.perf_counter()
        await self._engine.start()
        _print(check="start", seconds=time.perf_counter() - began)
        tokenizer = Tokenizer.from_buffer(self._engine.info.tokenizer_json)
        self._ids = [tokenizer.encode(text).ids for text in self._texts]

    async def sleep(self, rounds: int) -> None:
        """Let the engine sleep and wake."""
        expected = await self.run(range(1))
        for _ in range(rounds):
            awake_mib, began = used_mib(), time.perf_counter()
            await self._engine.sleep()
            asleep, asleep_mib = time.perf_counter() - began, used_mib()
            began = time.perf_counter()
            await self._engine.wake()
            woken = time.perf_counter() - began
            _print(
                check="sleep",
                sleep_seconds=asleep,
                wake_seconds=woken,
                awake_mib=awake_mib,
                asleep_mib=asleep_mib,
                is_equal=await self.run(range(1)) == expected,
            )

    async def resume(self, after: Sequence[int]) -> None:
        """Compare sequences with themselves: again, alone, and resumed."""
        places = range(len(self._ids))
        whole = await self.run(places)
        _compare("again", whole, await self.run(places))
        _compare(
            "alone", whole[:4], [(await self.run(range(each, each + 1)))[0] for each in range(4)]
        )
        for number in after:
            rest = await self.run(places, [each[:number] for each in whole])
            _compare(f"after {number}", [each[number:] for each in whole], rest)

    async def run(self, places: range, output: Sequence[list[int]] = ()) -> Tokens:
        """Run sequences at once, after these tokens, and return the other ones."""
        self._runs += 1
        found: dict[str, list[int]] = {}
        for place in places:
            identifier = f"{self._runs}-{place}"
            found[identifier] = []
            request = EngineRequest(
                id=identifier,
                prompt_token_ids=self._ids[place],
                max_tokens=self._tokens,
                sampling=_SAMPLINGS[place % len(_SAMPLINGS)][1],
                seed=place,
                # Nothing is in the prefix cache.
                cache_salt=identifier,
                output_token_ids=output[place] if output else [],
            )
            await self._engine.submit([request])
        left = len(found)
        while left:
            for each in (await self._engine.step()).outputs:
                found[each.sequence_id] += each.token_ids
                left -= each.end is not None
        return [*found.values()]

    async def aclose(self) -> None:
        """Stop the engine."""
        await self._engine.aclose()


def _compare(what: str, expected: Tokens, found: Tokens) -> None:
    for offset, (name, _) in enumerate(_SAMPLINGS):
        pairs = list(zip(expected, found, strict=True))[offset :: len(_SAMPLINGS)]
        equal = sum(ours == theirs for theirs, ours in pairs)
        tokens = sum(map(_common, pairs))
        _print(
            check="resumption",
            what=what,
            sampling=name,
            equal=equal,
            of=len(pairs),
            common_tokens=tokens,
            tokens=sum(len(theirs) for theirs, _ in pairs),
        )


def _common(pair: tuple[list[int], list[int]]) -> int:
    """Return the tokens until the first difference."""
    return next((n for n, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))


def _print(**result: object) -> None:
    print(json.dumps(result), flush=True)


async def _main(
    *, settings: dict[str, Any], rounds: int, sequences: int, tokens: int, after: list[int]
) -> None:
    checks = Checks(settings, sequences, tokens)
    try:
        await checks.start()
        if rounds:
            await checks.sleep(rounds)
        if after:
            await checks.resume(after)
    finally:
        await checks.aclose()


if __name__ == "__main__":
    asyncio.run(_main(**json.loads(sys.argv[1])))
