"""Images named by URL are counted by outcome."""

import asyncio

import pytest
from prometheus_client import REGISTRY

from gateway.records.errors import InvalidParameterError
from tests.gateway.completions.prompt.images.serving import (
    SERVED,
    Names,
    fetch,
    fetching,
    image,
    is_served,
    serving,
)
from tests.support.patience import PATIENCE_SECONDS


def count(outcome: str) -> float:
    """Return the count of an outcome in this process."""
    name = "sluice_gateway_image_fetches_total"
    return REGISTRY.get_sample_value(name, {"outcome": outcome}) or 0.0


async def test_each_image_is_counted_once_by_its_outcome() -> None:
    async def keep_waiting(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    before = {outcome: count(outcome) for outcome in ("fetched", "refused", "failed", "late")}
    async with serving() as server:
        names = Names({"images.example": [[SERVED]]})
        patient, hasty = (
            fetching(
                f"images.example:{server.port}",
                names=names,
                is_allowed=is_served,
                timeout_seconds=seconds,
            )
            for seconds in (PATIENCE_SECONDS, 0.3)
        )
        server.responses |= {
            "/a": image(),
            "/slow": keep_waiting,
            "/text": b"HTTP/1.1 404 X\r\n\r\n",
        }
        url = f"http://images.example:{server.port}"
        assert len(await fetch(patient, f"{url}/a", f"{url}/a")) == 2
        for fetcher, other in (
            (patient, f"{url}/text"),
            (hasty, f"{url}/slow"),
            (patient, "http://elsewhere.example/a"),
        ):
            with pytest.raises(InvalidParameterError):
                await fetch(fetcher, other)
    grown = {outcome: count(outcome) - value for outcome, value in before.items()}
    assert grown == {"fetched": 2, "refused": 1, "failed": 1, "late": 1}
