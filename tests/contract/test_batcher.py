"""Calls of one turn of the event loop share one run of a script."""

import asyncio
from collections.abc import Sequence

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from contract.scripts.batcher import ScriptBatcher


async def test_items_of_a_turn_run_together_and_fail_alone() -> None:
    runs: list[tuple[str, list[int]]] = []

    async def run(key: str, items: Sequence[int]) -> list[int]:
        runs.append((key, list(items)))
        if key == "unreachable":
            raise RedisConnectionError("closed")
        if 0 in items:
            raise ResponseError("this item is wrong")
        return [2 * each for each in items]

    batcher = ScriptBatcher(run, most=3)
    given = [("a", 1), ("b", 2), ("a", 3), ("a", 4), ("a", 5), ("c", 0), ("c", 6)]
    given += [("unreachable", 7), ("unreachable", 8)]
    replies = [batcher.add(key, item) for key, item in given]
    left_out = batcher.add("b", 9)
    left_out.cancel()
    results = await asyncio.gather(*replies, return_exceptions=True)

    assert results[:5] + results[6:7] == [2, 4, 6, 8, 10, 12]
    assert isinstance(results[5], ResponseError)
    assert all(isinstance(each, RedisConnectionError) for each in results[7:])
    expected = [("a", [1, 3, 4]), ("a", [5]), ("b", [2]), ("c", [0, 6]), ("c", [0]), ("c", [6])]
    assert sorted(runs) == sorted([*expected, ("unreachable", [7, 8])])
    await batcher.add("b", 2)
    assert len(runs) == len(expected) + 2
