"""Every process dies in the middle of a batch; each line still has one result and one row."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.gateway.batches.conftest import SETTINGS, create, ledger, line, results, wait_for
from tests.gateway.batches.s3_server import BUCKET
from tests.support.processes import wait_until
from tests.support.stack import Stack, running_stack

LINES = 200
TOKENS = 40


@pytest.fixture
def mortal(
    database_url: str, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stack]:
    """A deployment whose leases are short, and whose files are in S3."""
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    with running_stack(database_url=database_url) as stack:
        stack.environment |= SETTINGS | {"SLUICE_FILE_STORE": f"s3://{BUCKET}/kills"}
        stack.launch_worker("worker", WORKER)
        stack.start_jobs()
        stack.start_beat()
        stack.start_gateway("gateway-1")
        stack.start_gateway("gateway-2")
        stack.await_worker()
        yield stack


WORKER = {
    "SLUICE_ENGINE": "scripted",
    "SLUICE_SCRIPTED_STEP_SECONDS": "0.02",
    "SLUICE_MAX_SEQUENCES": "32",
    "SLUICE_LEASE_SECONDS": "2",
}


@pytest.mark.slow
@pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)
def test_each_line_ends_once_whatever_dies(mortal: Stack) -> None:
    survivor = mortal.gateways[1]
    with OpenAI(base_url=f"{survivor}/v1", api_key=mortal.key(), max_retries=3) as openai:
        batch = create(
            openai,
            *(line(f"r{each}", max_tokens=TOKENS, ignore_eos=True) for each in range(LINES)),
        )

        def ended() -> int:
            counts = openai.batches.retrieve(batch.id).request_counts
            return 0 if counts is None else counts.completed

        wait_until(lambda: ended() > 0, what="the first results")
        running = openai.batches.retrieve(batch.id)
        partial = results(openai, running.output_file_id)
        assert 0 < len(partial) < LINES
        estimate = running.to_dict()["estimated_completion_at"]
        assert isinstance(estimate, int)
        assert batch.created_at < estimate <= (batch.expires_at or 0)
        # The other gateway continues its lines.
        mortal.kill("gateway-1")
        mortal.kill("worker")
        mortal.start_worker("worker", **WORKER)
        mortal.kill("jobs")
        mortal.start_jobs()
        done = wait_for(openai, batch.id)
        assert done.status == "completed"
        assert results(openai, done.error_file_id) == {}
        found = results(openai, done.output_file_id)
        assert partial.items() <= found.items()
    assert {*found} == {f"r{each}" for each in range(LINES)}
    rows = ledger(mortal, batch.id, LINES)
    assert len(rows) == LINES
    # The id of a line whose reservation had to be repeated ends with a period and a number.
    assert {row[0].partition(".")[0] for row in rows} == {
        e["response"]["request_id"] for e in found.values()
    }
    assert {row[1] for row in rows} == {"finished"}
    assert sum(row[3] for row in rows) == LINES * TOKENS
