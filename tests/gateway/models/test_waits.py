"""The longest wait of each model in the last day, over all gateways."""

from typing import Any

import pytest
from redis.asyncio import Redis

from common import clock
from contract.messages import WorkerCard, WorkerState
from contract.queue import ModelStatus
from gateway.models.catalogue import ServedModel
from gateway.models.waits import LongestWaits
from gateway.platform.redis_client import MeasuredConnection

NOON = 1_800_014_400


class _Catalogue:
    models: list[ServedModel]

    def wait(self, **seconds: float) -> None:
        """Let the oldest job of each model have waited for so long."""
        self.models = [
            ServedModel(
                WorkerCard("w", model, WorkerState.READY, "vllm", 1),
                ModelStatus(1, 1, 0, oldest_wait_seconds=wait),
            )
            for model, wait in seconds.items()
        ]


async def test_longest_wait_of_each_model_is_kept_for_a_day(
    redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, catalogue = MeasuredConnection(redis), _Catalogue()
    stub: Any = catalogue
    gateways = [LongestWaits(executor, stub) for _ in range(2)]
    for hour, gateway, waits in (
        (0, 0, {"llama": 2.5, "qwen": 0.0}),
        (0, 1, {"llama": 1.0}),
        (1, 0, {"llama": 1.5, "qwen": 40.0}),
    ):
        monkeypatch.setattr(clock, "now_seconds", lambda hour=hour: NOON + 3600 * hour)
        catalogue.wait(**waits)
        await gateways[gateway].note()
    assert await gateways[1].of_last_day() == {"llama": 2500, "qwen": 40_000}
    monkeypatch.setattr(clock, "now_seconds", lambda: NOON + 24 * 3600)
    assert await gateways[1].of_last_day() == {"llama": 1500, "qwen": 40_000}
    for key in await redis.keys("console:counts:waits:*"):
        assert 0 < await redis.ttl(key) <= 25 * 3600
    await executor.aclose()
