"""`/v1/messages/batches` through Anthropic's client and over HTTP."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from anthropic import Anthropic, APIStatusError
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from openai import OpenAI

from tests.e2e.clients.environments import NODE, PROGRAMS
from tests.gateway.batches.conftest import (
    MAX_BODY_BYTES,
    MOST_LINES,
    create,
    execute,
    ledger,
    line,
    run_sluice,
)
from tests.support.patience import PROCESS_PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack

PATH: Final = "/v1/messages/batches"
PARAMS: Final[dict[str, Any]] = {
    "model": MODEL,
    "max_tokens": 4,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Hello\n\u2028"}],
}


@pytest.fixture
def anthropic(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Anthropic]:
    """Anthropic's client of a tenant of the test's own."""
    tenant = request.node.originalname.removeprefix("test_").replace("_", "-")[:32]
    with Anthropic(base_url=stack.url, api_key=stack.key(tenant), max_retries=0) as client:
        yield client


def asked(custom_id: str, **params: Any) -> Any:
    """Return a request of a batch."""
    return {"custom_id": custom_id, "params": PARAMS | params}


def wait_for(client: Anthropic, batch_id: str) -> MessageBatch:
    """Wait until a batch has ended."""
    deadline = time.monotonic() + PROCESS_PATIENCE_SECONDS
    while (batch := client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    return batch


def results(client: Anthropic, batch_id: str) -> dict[str, MessageBatchIndividualResponse]:
    """Return the results of a batch by their `custom_id`, which must be different."""
    found = list(client.messages.batches.results(batch_id))
    by_id = {each.custom_id: each for each in found}
    assert len(by_id) == len(found)
    return by_id


def counts(batch: MessageBatch, **others: int) -> None:
    """Require the counts of a batch; those that are not given are 0."""
    assert batch.request_counts.to_dict() == {
        **dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0),
        **others,
    }


def test_client_runs_a_batch_of_messages_at_half_price(stack: Stack, anthropic: Anthropic) -> None:
    run_sluice(stack, "prices", "add", MODEL, "--prompt", "3", "--cached", "3", "--completion", "7")
    batches = anthropic.messages.batches
    bad: dict[str, dict[str, Any]] = {
        "hot": {"temperature": 9},
        "listed": {"models": [MODEL]},
        "live": {"stream": True},
        "odd": {"stream": "no"},
        "unknown": {"model": "gpt-4"},
        "unnamed": {"model": None},
    }
    requests = [asked(f"good-{number}") for number in range(40)]
    requests += [asked(name, **params) for name, params in bad.items()]
    created = batches.create(requests=requests)
    assert created.processing_status == "in_progress"
    counts(created, processing=46)
    assert (created.expires_at - created.created_at).total_seconds() == 86_400
    assert (created.results_url, created.ended_at, created.cancel_initiated_at) == (None,) * 3
    ended = wait_for(anthropic, created.id)
    counts(ended, succeeded=40, errored=6)
    assert ended.ended_at is not None
    assert ended.ended_at > ended.created_at

    found = {name: each.result for name, each in results(anthropic, created.id).items()}
    options: Any = {name: each for name, each in PARAMS.items() if name != "temperature"}
    whole = anthropic.messages.create(**options, extra_body={"temperature": 0})
    for name in (f"good-{number}" for number in range(40)):
        good = found.pop(name)
        assert good.type == "succeeded"
        assert good.message.content == whole.content
        assert good.message.usage.service_tier == "batch"
    errors = {name: each.error.error for name, each in found.items() if each.type == "errored"}
    assert {name: each.type for name, each in errors.items()} == {
        **dict.fromkeys(bad, "invalid_request_error"),
        "unknown": "not_found_error",
    }
    assert errors["live"].message == "'stream' must be false in a batch."

    rows = ledger(stack, created.id, 40)
    assert len(rows) == 40
    assert {row[1:3] for row in rows} == {("finished", "batch")}
    usage = whole.usage
    prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert {row[4] for row in rows} == {-(-(prompt * 3 + usage.output_tokens * 7) // 2)}

    key = str(anthropic.api_key)
    with OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as openai:
        assert [each.id for each in openai.batches.list()] == [created.id]
        assert len(openai.files.list().data) == 3
        assert batches.delete(created.id).to_dict() == {
            "id": created.id,
            "type": "message_batch_deleted",
        }
        assert not openai.batches.list().data
        assert not openai.files.list().data
    with pytest.raises(APIStatusError) as raised:
        batches.retrieve(created.id)
    assert (raised.value.status_code, raised.value.type) == (404, "not_found_error")


@pytest.mark.parametrize("way", ["canceled", "expired"])
def test_batch_that_stops_tells_which_requests_ended(
    stack: Stack, anthropic: Anthropic, way: str
) -> None:
    batches = anthropic.messages.batches
    requests = [
        asked(f"long-{number}", max_tokens=1500, stop_sequences=None) for number in range(100)
    ]
    created = batches.create(requests=[asked("hot", temperature=9), *requests])
    headers = {"x-api-key": str(anthropic.api_key)}
    early = httpx.get(f"{stack.url}{PATH}/{created.id}/results", headers=headers)
    assert (early.status_code, early.json()["error"]["type"]) == (404, "not_found_error")
    with pytest.raises(APIStatusError) as raised:
        batches.delete(created.id)
    assert (raised.value.status_code, raised.value.type) == (409, "conflict_error")
    if way == "canceled":
        cancelled = batches.cancel(created.id)
        assert cancelled.processing_status in ("canceling", "ended")
        assert cancelled.cancel_initiated_at is not None
    else:
        execute(stack, "UPDATE batches SET expires_at = created_at WHERE id = :id", id=created.id)
    ended = wait_for(anthropic, created.id)
    found = results(anthropic, created.id)
    kinds = [each.result.type for each in found.values()]
    assert len(kinds) == 101
    counts(ended, **{kind: kinds.count(kind) for kind in {*kinds}})
    assert kinds.count(way) >= 90  # type: ignore[arg-type]


def test_batch_that_exceeds_a_limit_gives_its_reason_in_each_result(
    stack: Stack,
) -> None:
    key = stack.key("modest")
    run_sluice(stack, "tenants", "set", "modest", "--limit", "batch_tokens=10")
    with Anthropic(base_url=stack.url, api_key=key, max_retries=0) as anthropic:
        created = anthropic.messages.batches.create(requests=[asked("a"), asked("b")])
        counts(wait_for(anthropic, created.id), errored=2)
        for each in results(anthropic, created.id).values():
            assert each.result.type == "errored"
            assert "may have 10 tokens in total" in each.result.error.error.message


def test_pages_lead_from_the_newest_batch_to_the_oldest_and_back(
    stack: Stack, anthropic: Anthropic
) -> None:
    batches = anthropic.messages.batches
    ids = [batches.create(requests=[asked("a")]).id for _ in range(5)][::-1]
    with OpenAI(base_url=f"{stack.url}/v1", api_key=str(anthropic.api_key)) as openai:
        other = create(openai, line("a"))
    assert [each.id for each in batches.list(limit=2)] == ids
    first = batches.list(limit=2)
    assert (first.first_id, first.last_id, first.has_more) == (ids[0], ids[1], True)
    last = batches.list(after_id=ids[2], limit=2)
    assert ([each.id for each in last.data], last.has_more) == (ids[3:], False)
    back = batches.list(before_id=ids[3], limit=2)
    assert ([each.id for each in back.data], back.has_more) == (ids[1:3], True)
    assert not batches.list(before_id=ids[0]).data
    with pytest.raises(APIStatusError, match=other.id):
        batches.list(after_id=other.id)
    with pytest.raises(APIStatusError) as raised:
        batches.retrieve(other.id)
    assert raised.value.status_code == 404


BAD_BODIES: Final[list[tuple[bytes, str]]] = [
    (b"", "'requests' cannot be read"),
    (b"[]", "'requests' cannot be read: Expected `object`, got `array`"),
    (b'{"requests":{}}', "'requests' cannot be read: Expected `array`, got `object`"),
    (b'{"requests":[],"tier":1}', "unknown field `tier`"),
    (b'{"requests":[]}', "Given: 0."),
    (b'{"requests":[%b]}' % b",".join([b"1"] * (MOST_LINES + 1)), f"at most {MOST_LINES} lines"),
    (b'{"requests":[5]}', "'requests.0' cannot be read: Expected `object`, got `int`"),
    (b'{"requests":[{"custom_id":"a"}]}', "'requests.0' cannot be read: Object missing"),
    (b'{"requests":[{"custom_id":"a","params":[]}]}', "'requests.0.params' cannot be read"),
    (b'{"requests":[{"custom_id":"a","params":{},"url":"x"}]}', "unknown field `url`"),
    (b'{"requests":[{"custom_id":"a","params":{"x":"\xff"}}]}', "can't decode byte 0xff"),
    (b'{"requests":[{"custom_id":"a b","params":{}}]}', 'underscores. Given: "a b".'),
    (b'{"requests":[{"custom_id":"%b","params":{}}]}' % (b"a" * 65), "1 to 64 letters"),
    (
        b'{"requests":[{"custom_id":"a","params":{}},{"custom_id":"a","params":{}}]}',
        "'requests.1.custom_id' must differ from those before it. Given: \"a\".",
    ),
    (
        json.dumps({"requests": [asked(f"a{n}", model=f"m{n}") for n in range(17)]}).encode(),
        "at most 16 different models. Given: 17.",
    ),
]


@pytest.mark.parametrize(("content", "message"), BAD_BODIES)
async def test_bad_batch_is_refused_by_name(
    client: httpx.AsyncClient, content: bytes, message: str
) -> None:
    async with client:
        response = await client.post(PATH, content=content)
        assert response.status_code == 400
        assert response.json()["type"] == "error"
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert message in error["message"]


async def test_other_bad_requests_are_refused_by_name(client: httpx.AsyncClient) -> None:
    async with client:
        both = await client.get(PATH, params={"after_id": "a", "before_id": "b"})
        assert "'before_id' must be absent if 'after_id' is given" in both.text
        for name, value in (("limit", "1001"), ("limit", "0"), ("before_id", "x"), ("after", "x")):
            refused = await client.get(PATH, params={name: value})
            assert refused.status_code == 400
            assert name in refused.json()["error"]["message"]
        large = await client.post(PATH, content=b" " * (MAX_BODY_BYTES + 1))
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        other = {"requests": [asked("a")]}
        aliased = await client.post(f"/anthropic{PATH}?beta=true", json=other)
        assert aliased.status_code == 200
        content = json.dumps(other, indent=1).encode()  # Lines of a file must not break.
        assert (await client.post(PATH, content=content)).status_code == 200
        scoped = await client.post(
            f"{PATH}/{aliased.json()['id']}/results", headers={"x-api-dialect": "llamacpp"}
        )
        assert (scoped.status_code, scoped.json()["type"]) == (405, "error")


def test_key_without_the_scope_may_not_use_batches(stack: Stack) -> None:
    key = stack.key("acme", scopes=["usage"])
    for method, path in (("GET", PATH), ("POST", PATH), ("DELETE", f"{PATH}/msgbatch_1")):
        refused = httpx.request(method, f"{stack.url}{path}", headers={"x-api-key": key})
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")


@pytest.mark.slow
@NODE.skip
def test_client_for_node_runs_a_batch(stack: Stack, tmp_path: Path) -> None:
    file = "message_batches.mjs"
    (tmp_path / file).write_text((PROGRAMS / file).read_text())
    printed = NODE.run(
        ("node", file),
        tmp_path,
        ANTHROPIC_BASE_URL=stack.gateways[1],
        ANTHROPIC_API_KEY=stack.key("node-messages"),
        REQUESTS=json.dumps([asked("a"), asked("b", max_tokens=0)]),
    )
    found = json.loads(printed.splitlines()[-1])
    assert found.pop("counts") == {
        **dict.fromkeys(("processing", "canceled", "expired"), 0),
        **dict.fromkeys(("succeeded", "errored"), 1),
    }
    assert found.pop("results") == {"a": "succeeded", "b": "errored"}
    assert found == dict.fromkeys(("cancelled", "listed", "deleted"), True)
