"""A deployment that runs batches: two gateways, background jobs and a scripted worker."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest
from click.testing import CliRunner
from openai import OpenAI
from openai.types import Batch
from sqlalchemy import text

from gateway.cli.main import main
from gateway.platform.database.engine import Database
from tests.gateway.batches.s3_server import running_s3
from tests.gateway.conftest import gateway_client
from tests.support.patience import PROCESS_PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack, running_stack

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
DOCUMENTED_MODEL = "gpt-3.5-turbo-0125"
"""The model of OpenAI's examples."""
ENDED = ("completed", "failed", "expired", "cancelled")
MOST_LINES = 500
MAX_BODY_BYTES = 100_000
SETTINGS = {
    "SLUICE_MAX_FILE_LINES": str(MOST_LINES),
    "SLUICE_MAX_BODY_BYTES": str(MAX_BODY_BYTES),
    "SLUICE_BATCH_WINDOWS": "24h,7d",
    "SLUICE_ENCRYPTION_KEYS": "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=",
}


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """Two gateways, background jobs, and a worker whose engine steps a hundred times a second.

    The worker serves adapters.
    """
    with running_stack() as stack:
        stack.environment |= SETTINGS
        stack.launch_worker(
            environment={
                "SLUICE_ENGINE": "scripted",
                "SLUICE_SCRIPTED_STEP_SECONDS": "0.01",
                "SLUICE_LEASE_SECONDS": "60",
                "SLUICE_MODEL_ALIASES": DOCUMENTED_MODEL,
                "SLUICE_ADAPTER_SLOTS": "2",
                "SLUICE_ADAPTER_FOLDER": str(stack.directory / "adapters"),
            }
        )
        stack.start_jobs()
        stack.start_beat()
        for name in ("gateway-1", "gateway-2"):
            stack.start_gateway(name)
        stack.await_worker()
        yield stack


@pytest.fixture(scope="package")
def s3() -> Iterator[dict[str, str]]:
    """The variables of an S3 server."""
    with running_s3() as variables:
        yield variables


@pytest.fixture(scope="package")
def openai(stack: Stack) -> Iterator[OpenAI]:
    """OpenAI's client of the first gateway."""
    with OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key(), max_retries=0) as client:
        yield client


@pytest.fixture
def client(stack: Stack) -> httpx.AsyncClient:
    """A plain client of the second gateway."""
    return gateway_client(stack.gateways[1], stack.key())


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    """Return a line of an input file, by default a short completion."""
    known: dict[str, Any] = {"model": MODEL, "seed": 7, "max_tokens": 4}
    if url != COMPLETIONS:
        known["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        known["prompt"] = f"Say {custom_id}"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": known | body}


def jsonl(*lines: dict[str, Any]) -> bytes:
    """Return an input file."""
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def upload(openai: OpenAI, *lines: dict[str, Any]) -> str:
    """Upload an input file; return its id."""
    return openai.files.create(file=("input.jsonl", jsonl(*lines)), purpose="batch").id


def create(openai: OpenAI, *lines: dict[str, Any], endpoint: Any = COMPLETIONS) -> Batch:
    """Create a batch of lines."""
    return openai.batches.create(
        input_file_id=upload(openai, *lines), endpoint=endpoint, completion_window="24h"
    )


def wait_for(openai: OpenAI, batch_id: str, *states: str) -> Batch:
    """Wait until a batch has one of these states, by default until it has ended."""
    deadline = time.monotonic() + PROCESS_PATIENCE_SECONDS
    while time.monotonic() < deadline:
        batch = openai.batches.retrieve(batch_id)
        if batch.status in (states or ENDED):
            return batch
        time.sleep(0.1)
    raise AssertionError(f"the batch is {batch}")


def results(openai: OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the lines of a result file by their `custom_id`, which must be different."""
    if file_id is None:
        return {}
    lines = [json.loads(each) for each in openai.files.content(file_id).text.splitlines()]
    by_id = {each["custom_id"]: each for each in lines}
    assert len(by_id) == len(lines)
    return by_id


def run_sluice(stack: Stack, *arguments: str) -> str:
    """Run a command of `sluice` on a deployment; return its output."""
    environment = {
        name: value for name, value in stack.environment.items() if name.startswith("SLUICE_")
    }
    result = CliRunner(env=environment).invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def execute(stack: Stack, statement: str, **values: Any) -> list[Any]:
    """Execute a statement in the database of a deployment; return its rows."""

    async def run() -> list[Any]:
        database = Database(stack.database_url)
        try:
            async with database.writing() as transaction:
                result: Any = await transaction.execute(text(statement), values)
                return [tuple(row) for row in result] if result.returns_rows else []
        finally:
            await database.aclose()

    # Some tests run in an event loop.
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, run()).result()


def ledger(stack: Stack, batch_id: str, lines: int) -> list[Any]:
    """Wait until the ledger has a row for each line that ran; return outcome, tier and counts.

    The tenant must have no other batch since `batch_id` began.
    """
    query = (
        "SELECT l.request_id, l.outcome, l.service_tier, l.completion_tokens, l.cost_micros "
        "FROM usage_ledger l JOIN batches b ON b.id = :batch AND b.tenant_id = l.tenant_id "
        "WHERE l.service_tier = 'batch' AND l.created_at >= b.created_at"
    )
    deadline = time.monotonic() + PROCESS_PATIENCE_SECONDS
    while len(rows := execute(stack, query, batch=batch_id)) < lines:
        assert time.monotonic() < deadline, rows
        time.sleep(0.1)
    return rows
