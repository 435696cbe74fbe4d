"""The engines that tests run on: one set for all tests."""

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from typing_extensions import override

from tests.worker.samplers.engines import Engines, Side


class Runners(ExitStack):
    """Engines by runner; each starts when a test first needs it."""

    def __init__(self, *, is_long: bool) -> None:
        super().__init__()
        self._is_long = is_long
        self._engines: dict[str, Engines] = {}

    def __call__(self, runner: str) -> Engines:
        """Return the engines on a runner."""
        if runner not in self._engines:
            engines = Engines(runner, is_long=self._is_long)
            self._engines[runner] = self.enter_context(closing(engines))
        return self._engines[runner]

    @override
    def close(self) -> None:
        self._engines.clear()
        super().close()


@pytest.fixture(scope="session")
def runners(request: pytest.FixtureRequest) -> Iterator[Runners]:
    """The engines of this process."""
    with Runners(is_long=request.config.getoption("--long")) as runners:
        yield runners


# By default only what GPUs use: the newer runner, a step ahead.
# tests/worker/test_resumption_vllm.py and tests/e2e run the chain on the older one.
@pytest.fixture(
    params=[
        "v2-ahead",
        pytest.param("v2", marks=pytest.mark.long),
        pytest.param("v1", marks=pytest.mark.long),
    ]
)
def side(request: pytest.FixtureRequest, runners: Runners) -> Side:
    """An engine with chains."""
    runner, _, ahead = request.param.partition("-")
    return Side(runners(runner), ahead or "chained", is_fast=runner == "v1")
