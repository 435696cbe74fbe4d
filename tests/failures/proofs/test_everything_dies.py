"""Thousands of requests while gateways and background jobs are killed: each is counted once."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gateway.billing.ledger.reconcile import reconcile
from gateway.records.usage_record import Outcome
from tests.failures.proofs.client import Answer, request
from tests.failures.proofs.conftest import BUSY_WORKER, ENVIRONMENT, Scale, cost_of, deployed
from tests.failures.proofs.ledger import Row, open_books, totals
from tests.failures.proofs.run import CREDIT, Evidence, evidence_of_runs, request_of_receipt
from tests.support.secrets import scan_for_secrets
from tests.support.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

CHARGED = {Outcome.FINISHED, Outcome.CANCELLED}
SEED = 20_261_121


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, mortal_stack: Stack, scale: Scale
) -> Iterator[dict[str, Evidence]]:
    """One run on PostgreSQL, and in the long form one on SQLite."""
    stacks = {"postgresql": mortal_stack}
    with ExitStack() as exits:
        if request.config.getoption("--long"):
            other = deployed(None, environment=ENVIRONMENT, **BUSY_WORKER)
            stacks["sqlite"] = exits.enter_context(other)
        yield evidence_of_runs(stacks, scale, seed=SEED)


@pytest.fixture(
    scope="module", params=["postgresql", pytest.param("sqlite", marks=pytest.mark.long)]
)
def evidence(runs: dict[str, Evidence], request: pytest.FixtureRequest) -> Evidence:
    """One of the runs, which all tests below check."""
    return runs[request.param]


def by_id(rows: list[Row]) -> dict[str, Row]:
    return {row["request_id"]: row for row in rows}


def test_run_has_enough_requests_and_kills(evidence: Evidence, scale: Scale) -> None:
    statuses = Counter(answer.status for _, answer in evidence.answers)
    outcomes = Counter(row["outcome"] for row in evidence.rows)
    print(  # noqa: T201  (figures for pytest -rP)
        f"{len(evidence.answers)} requests in {evidence.load_seconds:.0f} s, {dict(statuses)}; "
        f"{len(evidence.rows)} rows, {dict(outcomes)}; "
        f"engine: {evidence.engine_prompt_tokens} prompt "
        f"and {evidence.engine_completion_tokens} completion tokens; place: "
        f"{evidence.freed}, all settled {evidence.settled_seconds:.1f} s after the end"
    )
    assert len(evidence.answers) >= scale.requests
    assert statuses[200] > scale.requests / 2
    assert statuses[429] > 0
    assert sum(answer.has_left for _, answer in evidence.answers) > scale.requests / 20
    assert outcomes.keys() >= {Outcome.FINISHED, Outcome.CANCELLED, Outcome.LOST}
    # Only killed gateways disturbed the requests.
    assert set(statuses) <= {0, 200, 429, 503}
    # Both gateways, and at least one that replaced a killed one.
    assert len({row["gateway"] for row in evidence.rows}) > 2


def test_every_admitted_request_has_one_row(evidence: Evidence) -> None:
    ids = Counter(row["request_id"] for row in evidence.rows)
    assert set(ids.values()) == {1}
    assert ids.keys() <= evidence.observer.reserved
    # A request without a row was released and never queued; Redis recorded no usage of it.
    released = evidence.observer.reserved - ids.keys()
    assert released <= evidence.observer.withdrawn
    assert released.isdisjoint(evidence.observer.requests_of_jobs)
    # A gateway releases a reserved request that it refuses, for example while it has no worker.
    assert len(released) <= max_refusals(evidence)


def max_refusals(evidence: Evidence) -> int:
    """Return the most requests that were refused for another reason than a limit.

    This is unknown for those whose clients disconnected or whose gateways were killed before a
    response; they count too.
    """
    statuses = Counter(answer.status for _, answer in evidence.answers)
    return statuses[503] + statuses[0] + evidence.early_refusals


def test_every_job_belongs_to_a_row(evidence: Evidence) -> None:
    rows = by_id(evidence.rows)
    jobs = {f"{id_}-{index}" for id_, row in rows.items() for index in range(row["jobs"])}
    assert evidence.observer.enqueued
    assert evidence.observer.enqueued <= jobs
    # A gateway may die between reservation and enqueueing, or find no worker.
    never_queued = rows.keys() - evidence.observer.requests_of_jobs
    outcomes = Counter(rows[id_]["outcome"] for id_ in never_queued)
    assert outcomes.keys() <= {Outcome.LOST, Outcome.FAILED}
    assert outcomes[Outcome.FAILED] <= max_refusals(evidence)


def test_every_completion_that_a_client_saw_has_a_row(evidence: Evidence) -> None:
    seen = {answer.request_id for _, answer in evidence.served if answer.request_id}
    assert len(seen) > len(evidence.served) / 2
    assert seen <= by_id(evidence.rows).keys()


def test_tokens_are_those_that_the_engine_counted(evidence: Evidence) -> None:
    (sums,) = totals(evidence.rows).values()
    assert sums["completion_tokens"] == evidence.engine_completion_tokens
    assert sums["prompt_tokens"] == evidence.engine_prompt_tokens


def test_rows_equal_the_usage_that_clients_received(evidence: Evidence) -> None:
    rows = by_id(evidence.rows)
    finished = [(wish, answer) for wish, answer in evidence.served if answer.is_finished]
    assert finished
    for wish, answer in finished:
        row = rows[str(answer.request_id)]
        assert row["outcome"] == Outcome.FINISHED
        assert row["is_streamed"] == int(wish.body["stream"])
        assert tokens_of(answer) == (row["prompt_tokens"], row["completion_tokens"])


def tokens_of(answer: Answer) -> tuple[int, int]:
    assert answer.usage is not None
    return answer.usage["prompt_tokens"], answer.usage["completion_tokens"]


def test_row_costs_its_tokens_unless_its_outcome_is_free(
    evidence: Evidence,
) -> None:
    rows = by_id(evidence.rows)
    for row in rows.values():
        free = (row["free_prompt_tokens"], row["free_completion_tokens"])
        if row["outcome"] in CHARGED:
            assert free == (0, 0), row
        elif row["outcome"] == Outcome.LOST and not row["is_streamed"]:
            assert free == (row["prompt_tokens"], row["completion_tokens"]), row
        assert row["cached_tokens"] == 0
        paid = (row["prompt_tokens"] - free[0], row["completion_tokens"] - free[1])
        assert row["cost_micros"] == cost_of(*paid), row
    left = [rows[str(a.request_id)] for _, a in evidence.served if a.has_left and a.request_id]
    alive = [row for row in left if row["gateway"] in evidence.living_gateways]
    assert alive
    assert {row["outcome"] for row in alive} <= {Outcome.CANCELLED, Outcome.FINISHED}
    assert all(row["completion_tokens"] > 0 for row in left)


def test_clients_pay_for_all_tokens_that_they_received(evidence: Evidence) -> None:
    rows = by_id(evidence.rows)
    # At least one kill of a gateway met a stream.
    assert evidence.cut is not None
    assert evidence.cut.received_tokens > 0
    assert rows[str(evidence.cut.request_id)]["outcome"] == Outcome.LOST
    streams = [answer for wish, answer in evidence.served if wish.body["stream"]]
    for answer in (evidence.cut, *streams):
        if answer.request_id is not None:
            row = rows[answer.request_id]
            # A worker lives, so each lost request has receipts.
            paid = row["completion_tokens"] - row["free_completion_tokens"]
            assert answer.received_tokens <= paid, row


def test_nothing_is_left_in_redis(evidence: Evidence) -> None:
    # A killed gateway leaves receipts of requests of its last second, which expire.
    requests = {each: request_of_receipt(each) for each in evidence.leftovers}
    assert [each for each, request in requests.items() if request is None] == []
    rows = by_id(evidence.rows)
    assert len(evidence.living_gateways) == 2
    gateways = {rows[str(request_id)]["gateway"] for request_id in requests.values()}
    assert gateways.isdisjoint(evidence.living_gateways)


def test_places_of_a_killed_gateway_are_free_after_its_leases(evidence: Evidence) -> None:
    assert evidence.freed is not None
    # It was taken at first, or this proves nothing.
    assert evidence.freed.refusals > 0


@pytest.mark.long
def test_retry_succeeds_after_retry_after_and_not_before(evidence: Evidence) -> None:
    assert evidence.waited is not None
    assert evidence.waited.told_ms > 50_000
    assert set(evidence.waited.statuses_before) == {429}
    assert 200 in evidence.waited.statuses_then


async def test_redis_and_the_ledger_agree(evidence: Evidence) -> None:
    async with open_books(evidence.stack) as books:
        report = await reconcile(books.redis, books.database)
    assert report.is_clean, report


async def test_sums_equal_rows(evidence: Evidence) -> None:
    by = ("tenant_id", "project_id", "credential_id", "model")
    expected = totals(
        [{**row, "project_id": row["project_id"] or ""} for row in evidence.rows], *by
    )
    async with open_books(evidence.stack) as books:
        for period in ("hour", "day"):
            sums = await books.select(f"SELECT * FROM usage_rollups WHERE period = '{period}'")
            reported = {
                group: values
                | {"requests": sum(r["requests"] for r in sums if key_of(r, by) == group)}
                for group, values in totals(sums, *by).items()
            }
            assert reported == expected
            failed = sum(row["failed_requests"] for row in sums)
            assert failed == sum(row["outcome"] not in CHARGED for row in evidence.rows)


def key_of(row: Row, by: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(row[name] for name in by)


async def test_usage_endpoint_returns_the_sums_of_rows(evidence: Evidence) -> None:
    tenants = {credential.tenant: credential for credential in evidence.credentials[::-1]}
    for tenant, credential in tenants.items():
        rows = [row for row in evidence.rows if row["tenant_id"] == tenant]
        expected = totals(rows)
        answer = await request(evidence.stack.url, credential.text, path="/v1/usage?bucket=total")
        (reported,) = answer.json["data"]
        assert {name: reported[name] for name in expected[()]} == expected[()]
        path = "/v1/usage?bucket=total&group_by=key"
        by_key = totals(rows, "credential_id")
        for reported in (await request(evidence.stack.url, credential.text, path=path)).json[
            "data"
        ]:
            expected_of_key = by_key.pop((reported["key"],))
            assert {name: reported[name] for name in expected_of_key} == expected_of_key
        assert by_key == {}


async def test_credits_and_budgets_are_reduced_by_the_costs_of_rows(evidence: Evidence) -> None:
    for credential in evidence.credentials:
        if credential.id.startswith("jwt:"):
            continue
        rows = [row for row in evidence.rows if row["credential_id"] == credential.id]
        tenant = [row for row in evidence.rows if row["tenant_id"] == credential.tenant]
        limits = (await request(evidence.stack.url, credential.text, path="/v1/limits")).json
        key = next(scope for scope in limits["scopes"] if scope["scope"] == "key")
        if key["limits"]["budget_micros"]["limit"] is not None:
            assert key["limits"]["budget_micros"]["used"] == sum(r["cost_micros"] for r in rows)
        if credential.tenant == "prepaid" and credential.project is None:
            spent = sum(row["cost_micros"] for row in tenant)
            assert spent > 0
            assert limits["credits"]["remaining_micros"] == CREDIT - spent


def test_no_secret_is_written_anywhere(evidence: Evidence) -> None:
    assert {answer.status for answer in evidence.refusals} == {400, 401}
    assert {"errors", "database", "redis at the end", "gateway-1.log"} <= evidence.dumps.keys()
    assert scan_for_secrets(evidence.dumps, evidence.secrets) == []
    assert [name for name, dump in evidence.dumps.items() if b"uthorization: Bearer" in dump] == []
