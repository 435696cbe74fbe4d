"""`/v1/batches`: from an uploaded file to results, money and events."""

import json
import re
from functools import partial
from typing import Any

import httpx
import pytest
import redis
from openai import APIStatusError, OpenAI

from gateway.completions.stored.service import RETIRED_MS
from gateway.platform.settings import Settings
from gateway.records.limits import LimitName
from tests.gateway.batches.conftest import (
    CHATS,
    COMPLETIONS,
    DOCUMENTED_MODEL,
    create,
    execute,
    jsonl,
    ledger,
    line,
    results,
    run_sluice,
    wait_for,
)
from tests.support.processes import wait_until
from tests.support.stack import MODEL, Stack

PROMPT_MICROS, COMPLETION_MICROS = 3_000_000, 7_000_000


def test_embeddings_run_in_a_batch(stack: Stack, openai: OpenAI) -> None:
    stack.start_worker(
        "embedder",
        SLUICE_ENGINE="scripted",
        SLUICE_RUNNER="pooling",
        SLUICE_MODEL_NAME="embedder",
        SLUICE_TOOL_PARSER="",
        SLUICE_REASONING_PARSER="",
    )
    bodies: list[dict[str, Any]] = [
        {"model": "embedder", "input": [f"text {n}", "b"] * 20} for n in range(3)
    ]
    bodies.append({"model": "embedder", "input": ""})
    lines = [
        {"custom_id": f"e{n}", "method": "POST", "url": "/v1/embeddings", "body": body}
        for n, body in enumerate(bodies)
    ]
    batch = wait_for(openai, create(openai, *lines, endpoint="/v1/embeddings").id)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 3, "failed": 1}
    done, failed = results(openai, batch.output_file_id), results(openai, batch.error_file_id)
    assert failed["e3"]["response"]["body"]["error"]["param"] == "input"
    for number in range(3):
        whole = openai.embeddings.create(**bodies[number], encoding_format="float")
        body = done[f"e{number}"]["response"]["body"]
        assert body["data"] == [each.to_dict() for each in whole.data]
        assert body["usage"] == whole.usage.to_dict()
    assert batch.usage is not None
    used = [each["response"]["body"]["usage"]["prompt_tokens"] for each in done.values()]
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (sum(used), 0)
    rows = ledger(stack, batch.id, 3)
    assert {row[1:3] for row in rows} == {("finished", "batch")}


def test_batch_runs_at_half_price_and_each_line_has_one_result(
    stack: Stack, openai: OpenAI
) -> None:
    # Other tests run batches of the usual tenant.
    key = stack.key("thrifty")
    openai = openai.with_options(api_key=key)
    prices = ("--prompt", "3", "--cached", "3", "--completion", "7")
    run_sluice(stack, "prices", "add", MODEL, *prices)
    run_sluice(stack, "webhooks", "create", "--tenant", "thrifty", "https://hooks.example.com/")
    lines = [line(f"r{number}") for number in range(100)]
    lines[3] = line("r3", temperature=-1)
    lines[50] = line("r50", max_tokens=10**6)
    created = create(openai, *lines)
    assert created.status == "validating"
    assert created.expires_at == created.created_at + 86_400
    batch = wait_for(openai, created.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 100, "completed": 98, "failed": 2}
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(filter(None, times))
    assert batch.model == MODEL

    done, failed = results(openai, batch.output_file_id), results(openai, batch.error_file_id)
    assert {*done, *failed} == {f"r{number}" for number in range(100)}
    assert {*failed} == {"r3", "r50"}
    params = {name: each["response"]["body"]["error"]["param"] for name, each in failed.items()}
    assert params == {"r3": "temperature", "r50": "max_tokens"}
    whole = openai.completions.create(**lines[9]["body"])
    assert done["r9"]["response"]["body"]["choices"] == whole.to_dict()["choices"]

    rows = ledger(stack, batch.id, 98)
    ids = {each["response"]["request_id"] for each in done.values()}
    assert {row[0] for row in rows} == ids
    assert {row[1:3] for row in rows} == {("finished", "batch")}
    usage = [each["response"]["body"]["usage"] for each in done.values()]
    assert batch.usage is not None
    assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in usage)
    assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in usage)
    costs = [-(-(each["prompt_tokens"] * 3 + each["completion_tokens"] * 7) // 2) for each in usage]
    assert sum(row[4] for row in rows) == sum(costs)
    assert batch.usage.to_dict()["cost"] == sum(costs) / 1e6
    report = httpx.get(
        f"{stack.url}/v1/usage",
        params={"group_by": "service_tier", "bucket": "total"},
        headers={"authorization": f"Bearer {key}"},
    ).json()["data"]
    assert {each["service_tier"]: each["requests"] for each in report}["batch"] == 98

    ((kind, body),) = execute(
        stack, "SELECT kind, body FROM webhook_events WHERE subject = :id", id=batch.id
    )
    assert kind == "batch.completed"
    assert json.loads(body)["data"]["request_counts"]["completed"] == 98
    assert f"{batch.id}  completed  98/100" in run_sluice(
        stack, "batches", "list", "--tenant", "thrifty"
    )
    shown = run_sluice(stack, "batches", "show", "--tenant", "thrifty", batch.id)
    assert re.search(r"request_counts.failed +2\n", shown)
    assert batch.output_file_id
    assert batch.output_file_id in run_sluice(stack, "files", "list", "--tenant", "thrifty")
    run_sluice(stack, "files", "delete", "--tenant", "thrifty", batch.output_file_id)
    # Nothing is left of the lines in Redis, but their keys stay taken for a minute.
    with redis.Redis.from_url(stack.redis.url) as server:
        assert not list(server.scan_iter("*}:content"))
        names = [*server.scan_iter("*:idempotency:*"), *server.scan_iter("*:request:*")]
        assert all(0 < server.pttl(name) <= 2 * RETIRED_MS for name in names)


def test_chats_run_in_the_dialect_of_the_batch(openai: OpenAI) -> None:
    # Editors and scripts leave blank lines at the end.
    content = jsonl(line("a", CHATS), line("b", CHATS, n_predict=2)) + b"\r\n \n\n"
    batch = openai.batches.create(
        input_file_id=openai.files.create(file=("chats.jsonl", content), purpose="batch").id,
        endpoint=CHATS,
        completion_window="24h",
        metadata={"job": "nightly"},
        extra_headers={"x-api-dialect": "llamacpp"},
    )
    assert batch.metadata == {"job": "nightly"}
    ended = wait_for(openai, batch.id)
    assert (ended.status, ended.request_counts.total) == ("completed", 2)  # type: ignore[union-attr]
    done = results(openai, ended.output_file_id)
    assert done["b"]["response"]["body"]["usage"]["completion_tokens"] == 2
    assert "timings" in done["a"]["response"]["body"]


def test_messages_and_their_errors_have_anthropics_form(openai: OpenAI) -> None:
    path: Any = "/v1/messages"
    batch = create(openai, line("a", path), line("b", path, max_tokens=0), endpoint=path)
    ended = wait_for(openai, batch.id)
    [message] = results(openai, ended.output_file_id).values()
    assert message["response"]["body"]["type"] == "message"
    assert message["response"]["body"]["usage"]["service_tier"] == "batch"
    [refused] = results(openai, ended.error_file_id).values()
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["type"] == "invalid_request_error"
    assert refused["response"]["body"]["type"] == "error"


def test_responses_run_as_lines(openai: OpenAI) -> None:
    path: Any = "/v1/responses"
    asked = {"input": "Hello", "prompt": None, "max_tokens": None}
    good = line("a", path, **asked, max_output_tokens=3)
    bad = line("b", path, **asked, previous_response_id="resp_1")
    create_one: Any = partial(
        openai.responses.create, model=MODEL, input="Hello", max_output_tokens=3
    )
    named = {"previous_response_id": create_one().id}
    more = line("c", path, **asked, **named, max_output_tokens=3)
    batch = create(openai, good, bad, more, endpoint=path)
    ended = wait_for(openai, batch.id)
    found = results(openai, ended.output_file_id)
    body, longer = (found[name]["response"]["body"] for name in "ac")
    assert longer["usage"]["input_tokens"] == create_one(**named).usage.input_tokens
    assert (body["object"], body["status"], body["store"]) == ("response", "incomplete", False)
    assert body["usage"]["output_tokens"] == 3
    refused = results(openai, ended.error_file_id)["b"]["response"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["code"] == "previous_response_not_found"


BAD_LINES: list[tuple[bytes, str, str]] = [
    (b"{", "invalid_json_line", "not valid JSON"),
    (b"", "empty_line", "The line is empty."),
    (b"[]", "invalid_json_line", "not a JSON object"),
    (jsonl(line("good"))[:-1], "duplicate_custom_id", 'custom_id "good" occurs in an earlier'),
    (jsonl(line("chat", CHATS))[:-1], "mismatched_url", f"endpoint of the batch, {COMPLETIONS}."),
    (jsonl(line("url", "/v1/embeddings"))[:-1], "mismatched_url", 'Given: "/v1/embeddings".'),
    (jsonl(line("model", model="gpt-4"))[:-1], "model_not_found", 'The model "gpt-4" does not'),
    # It exists, but the key may not use it.
    (jsonl(line("foreign", model=MODEL))[:-1], "model_not_found", f'The model "{MODEL}" does not'),
    (jsonl(line("stream", stream=True))[:-1], "invalid_body", "'body.stream' must be false."),
    (
        b'{"custom_id":"m","method":"GET","url":"x","body":{}}',
        "invalid_parameter",
        'POST. Given: "GET"',
    ),
    (jsonl(line("o") | {"url": 5})[:-1], "mismatched_url", f"batch, {COMPLETIONS}. Given: 5."),
    (jsonl(line("p", model=None))[:-1], "missing_required_parameter", "parameter: 'body.model'"),
    (
        b'{"custom_id":"o","method":"POST","url":"x","body":{},"priority":1}',
        "unknown_parameter",
        'only the members custom_id, method, url, body. Given: "priority".',
    ),
    (b'{"custom_id":"n","method":"POST","url":"x"}', "missing_required_parameter", "'body'"),
    (b'{"custom_id":"","method":"POST","url":"x","body":{}}', "invalid_custom_id", "Given: 0."),
    (b'{"custom_id":1,"method":"POST","url":"x","body":{}}', "invalid_parameter", "'custom_id'"),
]


def test_bad_lines_fail_the_batch_with_their_numbers(stack: Stack) -> None:
    good = jsonl(line("good", model=DOCUMENTED_MODEL))
    # CRLF is valid, because JSON allows white space around a value.
    content = good + jsonl(line("crlf", model=DOCUMENTED_MODEL))[:-1] + b"\r\n"
    content += b"".join(bad + b"\n" for bad, _, _ in BAD_LINES)
    key = stack.key("picky", allowed_models=[DOCUMENTED_MODEL])
    with OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as openai:
        file = openai.files.create(file=("bad.jsonl", content), purpose="batch")
        created = openai.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
        )
        batch = wait_for(openai, created.id)
    assert batch.status == "failed"
    assert batch.errors is not None
    found = batch.errors.data or []
    assert [(each.line, each.code) for each in found] == [
        (number, code) for number, (_, code, _) in enumerate(BAD_LINES, start=3)
    ]
    for each, (_, _, message) in zip(found, BAD_LINES, strict=True):
        assert message in (each.message or "")
    assert batch.output_file_id is None


def test_line_of_an_alias_runs_as_its_model(stack: Stack) -> None:
    run_sluice(stack, "aliases", "set", "newest", f"{MODEL}=1")
    key = stack.key("aliasing", allowed_models=["newest"])

    def is_applied(url: str) -> bool:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"{url}/v1/models/newest", headers=headers).is_success

    wait_until(lambda: all(map(is_applied, stack.gateways)), what="the alias at every gateway")
    with OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as openai:
        batch = wait_for(openai, create(openai, line("one", model="newest")).id)
        assert batch.status == "completed", batch.errors
        done = results(openai, batch.output_file_id)
    assert done["one"]["response"]["body"]["model"] == MODEL
    ledger(stack, batch.id, 1)
    query = "SELECT model FROM usage_ledger WHERE tenant_id = 'aliasing'"
    assert execute(stack, query) == [(MODEL,)]


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint", 'Given: "/v1/moderations".'),
        ({"completion_window": "1h"}, "completion_window", 'Given: "1h".'),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "16 pairs"),
        ({"metadata": {"a": "b" * 513}}, "metadata", "values of at most 512"),
        ({"metadata": {"a": "\n\x1b"}}, "metadata", "must not contain control characters"),
        ({"metadata": {"a\n": ""}}, "metadata", "must not contain control characters"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": "7200"}},
            "output_expires_after.seconds",
            "seconds",
        ),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "output_expires_after",
            "Given: 1.",
        ),
        ({"input_file_id": 5}, "input_file_id", "input_file_id"),
        ({"color": "red"}, "color", "color"),
    ],
)
async def test_bad_request_for_a_batch_is_refused_by_name(
    client: httpx.AsyncClient, changes: dict[str, Any], param: str, message: str
) -> None:
    async with client:
        file = await client.post("/v1/files", files={"file": jsonl(line("a"))}, data=PURPOSE)
        body = {
            "input_file_id": file.json()["id"],
            "endpoint": COMPLETIONS,
            "completion_window": "7d",
        }
        content, headers = json.dumps(body | changes), {"content-type": "application/json"}
        response = await client.post("/v1/batches", content=content, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].startswith(param)
    assert message in error["message"]


PURPOSE = {"purpose": "batch"}
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}
"""Fifteen seconds on the scripted engine."""


def long_lines(number: int) -> list[dict[str, Any]]:
    """Return lines of which one ends at once."""
    return [line("short"), *(line(f"long{each}", **LONG) for each in range(number - 1))]


@pytest.mark.parametrize("way", ["cancelled", "expired", "revoked"])
def test_batch_that_stops_charges_only_what_it_delivers(
    stack: Stack, openai: OpenAI, way: str
) -> None:
    if way == "revoked":
        key = stack.key("leaver")
        openai = OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)
    batch = create(openai, *long_lines(200))
    wait_for(openai, batch.id, "in_progress")
    if way == "cancelled":
        # A file of a running batch stays.
        with pytest.raises(APIStatusError) as raised:
            openai.files.delete(batch.input_file_id)
        assert (raised.value.status_code, raised.value.code) == (409, "conflict")
        # Clients would otherwise repeat the request, as they do after other conflicts.
        assert raised.value.response.headers["x-should-retry"] == "false"
        assert openai.batches.cancel(batch.id).status == "cancelling"
        openai.files.delete(batch.input_file_id)
    elif way == "expired":
        execute(stack, "UPDATE batches SET expires_at = created_at WHERE id = :id", id=batch.id)
    else:
        (key_id,) = execute(
            stack, "SELECT id FROM api_keys WHERE tenant_id = 'leaver' AND revoked_at IS NULL"
        )[0]
        run_sluice(stack, "keys", "revoke", "--tenant", "leaver", key_id)
        openai = OpenAI(
            base_url=f"{stack.url}/v1", api_key=stack.key("leaver", dialect=None), max_retries=0
        )
    ended = wait_for(openai, batch.id)
    assert ended.status == ("expired" if way == "expired" else "cancelled")
    done, failed = results(openai, ended.output_file_id), results(openai, ended.error_file_id)
    assert len(done) + len(failed) == 200
    code = "batch_expired" if way == "expired" else "batch_cancelled"
    assert {each["error"]["code"] for each in failed.values()} == {code}
    if way == "revoked":
        assert ended.errors is not None
        assert [each.code for each in ended.errors.data or []] == ["invalid_api_key"]
    rows = ledger(stack, batch.id, len(done))
    paid = [row for row in rows if row[4]]
    assert {row[0] for row in paid} <= {e["response"]["request_id"] for e in done.values()}
    assert {row[1] for row in paid} <= {"finished"}


def test_tokens_of_running_batches_are_limited(stack: Stack) -> None:
    key = stack.key("bounded")
    run_sluice(stack, "tenants", "set", "bounded", "--limit", "batch_tokens=35000")
    with OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as openai:
        # Each line may take 1,500 tokens and one for each byte of its prompt.
        first = create(openai, *(line(f"r{each}", **LONG) for each in range(20)))
        wait_for(openai, first.id, "in_progress")
        # A number of choices that no request may have takes nothing away from the others.
        odd = line("less", n=-1e300), line("more", n=1e300)
        lines = *odd, *(line(f"r{each}") for each in range(60))
        second = wait_for(openai, create(openai, *lines).id)
        openai.batches.cancel(first.id)
        wait_for(openai, first.id)
    assert second.status == "failed"
    assert second.errors is not None
    (error,) = second.errors.data or []
    assert error.code == "token_limit_exceeded"
    assert "35000 tokens in total" in (error.message or "")
    assert "Each byte of a line counts as one token" in (error.message or "")


def test_lines_stay_within_the_limits_of_their_key(stack: Stack) -> None:
    zero = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "tokens_per_day")
    batches = {}
    for name in zero:
        key = stack.key("limited", limits={LimitName(name): 0})
        openai = OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)
        batches[name] = create(openai, line("a"), line("b"))
    key = stack.key("limited", limits={LimitName.REQUESTS_PER_DAY: 3})
    with OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as openai:
        daily = create(openai, *(line(f"r{each}") for each in range(40)))
        for name, batch in batches.items():
            ended = wait_for(openai, batch.id)
            failed = results(openai, ended.error_file_id)
            errors = [each["response"]["body"]["error"] for each in failed.values()]
            assert [name.replace("_", " ") in each["message"] for each in errors] == [True] * 2
        # Three lines run today. The others do not hold a gateway's place for lines until tomorrow.
        query = "SELECT state, lines, gateway FROM batch_chunks WHERE batch_id = :id"
        wait_until(
            lambda: (
                openai.batches.retrieve(daily.id).request_counts.completed == 3  # type: ignore[union-attr]
                and {row[0::2] for row in execute(stack, query, id=daily.id) if row[0] != "done"}
                <= {("waiting", "")}
            ),
            what="three lines, and the others waiting",
        )
        openai.batches.cancel(daily.id)
        ended = wait_for(openai, daily.id)
        assert len(results(openai, ended.output_file_id)) == 3
        assert len(results(openai, ended.error_file_id)) == 37
    assert len(ledger(stack, daily.id, 3)) == 3


@pytest.mark.slow
def test_lines_of_a_suspended_tenant_are_given_back_and_run_once_later(
    stack: Stack, openai: OpenAI
) -> None:
    key = stack.key("debtor")
    with OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as debtor:
        lines = [line(f"r{each}", max_tokens=60, ignore_eos=True) for each in range(200)]
        batch = create(debtor, *lines)
        wait_until(
            lambda: debtor.batches.retrieve(batch.id).request_counts.completed > 0,  # type: ignore[union-attr]
            what="the first results",
        )
        run_sluice(stack, "tenants", "suspend", "debtor")
        query = "SELECT COUNT(*) FROM batch_chunks WHERE batch_id = :id AND state = 'released'"
        wait_until(lambda: execute(stack, query, id=batch.id) == [(0,)], what="no chunk being held")
        assert wait_for(openai, create(openai, line("a")).id).status == "completed"
        run_sluice(stack, "tenants", "activate", "debtor")
        ended = wait_for(debtor, batch.id)
        assert {*results(debtor, ended.output_file_id)} == {f"r{each}" for each in range(200)}
    assert {row[1] for row in ledger(stack, batch.id, 200)} == {"finished"}
    assert len(ledger(stack, batch.id, 200)) == 200


def test_key_of_a_client_never_stands_for_a_line(openai: OpenAI) -> None:
    batch = create(openai, line("a"))
    key = {"idempotency-key": f"{batch.id}:1"}
    openai.completions.create(model=MODEL, prompt="Hi", max_tokens=1, extra_headers=key)
    assert wait_for(openai, batch.id).request_counts.completed == 1  # type: ignore[union-attr]


def test_settings_of_batches_are_checked() -> None:
    with pytest.raises(ValueError, match="such as 90m, 24h or 7d"):
        Settings(batch_windows=("1 day",))
