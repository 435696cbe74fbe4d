"""A deployment of its own for hostile requests: two gateways and the real engine, on loopback."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.e2e.asking import wait_until_listed
from tests.support.stack import ENGINE_START_SECONDS, MODEL, Stack, running_stack


@pytest.fixture(scope="session")
def target() -> Iterator[Stack]:
    """What is shot at; at the end all of it must still be there and sound."""
    with running_stack() as stack:
        for name in ("gateway-1", "gateway-2"):
            stack.start_gateway(name)
        stack.start_worker(
            ready_seconds=ENGINE_START_SECONDS,
            SLUICE_MAX_SEQUENCES="96",
            SLUICE_TOOL_PARSER="hermes",
            SLUICE_REASONING_PARSER="qwen3",
        )
        for url in stack.gateways:
            with OpenAI(base_url=f"{url}/v1", api_key=stack.key(), max_retries=0) as client:
                wait_until_listed(client, MODEL)
        yield stack
