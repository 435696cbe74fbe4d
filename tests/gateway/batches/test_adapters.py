"""LoRA adapters with the scripted engine: registered, chosen, listed, charged and deleted."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from redis.asyncio import Redis

from contract import keys, messages
from contract.messages import AdapterSupport
from gateway.models.catalogue import Catalogue
from gateway.records.scopes import Scope
from tests.gateway.batches.conftest import create, execute, line, results, run_sluice, wait_for
from tests.support.adapters import write_adapter
from tests.support.fake_worker import FakeWorker
from tests.support.patience import PROCESS_PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack, metric

FULL_NAME = f"{MODEL}:poet"


class Api:
    """Both listeners of the second gateway."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.url = stack.gateways[1]
        self.operators = stack.operators_of(self.url)
        self.admin = stack.key("ops", scopes=(Scope.ADMIN,))

    def call(self, method: str, path: str, key: str, body: Any = None, **headers: str) -> Any:
        listener = self.operators if path.startswith("/admin") else self.url
        return httpx.request(
            method,
            listener + path,
            json=body,
            headers={"authorization": f"Bearer {key}", **headers},
            timeout=PROCESS_PATIENCE_SECONDS,
        )

    def register(self, tenant: str, name: str, source: str, **fields: Any) -> dict[str, Any]:
        """Register an adapter and wait until it is validated."""
        path = f"/admin/tenants/{tenant}/adapters"
        body = {"name": name, "base_model": MODEL, "source": source, **fields}
        response = self.call("POST", path, self.admin, body)
        assert response.status_code == 200, response.text
        assert response.json()["state"] == "validating"
        deadline = time.monotonic() + PROCESS_PATIENCE_SECONDS
        while True:
            found = self.call("GET", f"{path}/{response.json()['id']}", self.admin).json()
            if found["state"] != "validating":
                return dict(found)
            assert time.monotonic() < deadline, found
            time.sleep(0.05)

    def complete(self, key: str, model: str, **headers: str) -> httpx.Response:
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}
        response: httpx.Response = self.call("POST", "/v1/completions", key, body, **headers)
        return response

    def text(self, key: str, model: str) -> str:
        response = self.complete(key, model)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def eventually(self, key: str, model: str, status: int) -> httpx.Response:
        """Complete until the gateway has received a change."""
        deadline = time.monotonic() + PROCESS_PATIENCE_SECONDS
        while (response := self.complete(key, model)).status_code != status:
            assert time.monotonic() < deadline, response.text
            time.sleep(0.02)
        return response


@pytest.fixture(scope="module")
def api(stack: Stack) -> Api:
    return Api(stack)


@pytest.fixture(scope="module")
def poet(stack: Stack, api: Api, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An adapter of `acme`, whose source has disappeared since."""
    folder = tmp_path_factory.mktemp("sources") / "poet"
    stack.key(), stack.key("other")
    poet = api.register("acme", "poet", write_adapter(folder))
    assert poet["state"] == "ready", poet
    (folder / "adapter_model.safetensors").unlink()
    api.eventually(stack.key(), "poet", 200)
    return poet


def test_adapter_is_chosen_by_both_names_and_has_its_own_text(
    stack: Stack, api: Api, poet: dict[str, Any]
) -> None:
    key = stack.key()
    assert (poet["rank"], poet["target_modules"], poet["is_shared"]) == (4, ["q_proj"], False)
    texts = {name: api.text(key, name) for name in ("poet", FULL_NAME, MODEL)}
    assert texts["poet"] == texts[FULL_NAME] != texts[MODEL]
    assert api.complete(key, FULL_NAME).json()["model"] == FULL_NAME
    estimate = api.call(
        "POST", "/v1/completions:estimate", key, {"model": "poet", "prompt": "Hi", "max_tokens": 1}
    )
    assert estimate.status_code == 200


def test_models_list_own_adapters_with_their_parent(
    stack: Stack, api: Api, poet: dict[str, Any]
) -> None:
    listed = api.call("GET", "/v1/models", stack.key()).json()["data"]
    models = {each["id"]: each for each in listed}
    assert {MODEL, "poet"} <= {*models}
    assert (models[MODEL]["root"], models[MODEL]["parent"]) == (MODEL, None)
    assert models["poet"]["parent"] == MODEL
    assert models["poet"]["root"] == f"sha256:{poet['sha256']}"
    assert FULL_NAME in models["poet"]["aliases"]
    assert models["poet"]["ready"] is True
    for name in ("poet", FULL_NAME):
        assert api.call("GET", f"/v1/models/{name}", stack.key()).json() == models["poet"]
    others = api.call("GET", "/v1/models", stack.key("other")).json()["data"]
    assert "poet" not in {each["id"] for each in others}
    assert api.call("GET", "/v1/models/poet", stack.key("other")).status_code == 404


@pytest.mark.usefixtures("poet")
@pytest.mark.parametrize("dialect", ["openai", "vllm", "llamacpp", "mistralrs"])
def test_adapter_of_another_tenant_is_an_unknown_model(
    stack: Stack, api: Api, dialect: str
) -> None:
    refused = [
        api.complete(stack.key("other"), name, **{"x-api-dialect": dialect})
        for name in ("poet", "nobody", FULL_NAME, f"{MODEL}:nobody")
    ]
    if dialect == "llamacpp":  # It takes any name for the only model.
        assert {each.status_code for each in refused} == {200}
        texts = {each.json()["choices"][0]["text"] for each in refused}
        assert texts == {api.text(stack.key("other"), MODEL)}
        return
    assert {each.status_code for each in refused} == {404}
    messages = [each.text.replace("poet", "nobody") for each in refused]
    assert messages[0] == messages[1]
    assert messages[2] == messages[3]


@pytest.mark.usefixtures("poet")
def test_model_list_of_a_key_applies_to_adapters(stack: Stack, api: Api) -> None:
    only_base = stack.key(allowed_models=(MODEL,))
    only_adapter = stack.key(allowed_models=(FULL_NAME,))
    assert api.complete(only_base, "poet").status_code == 404
    assert api.complete(only_base, MODEL).status_code == 200
    assert api.complete(only_adapter, "poet").status_code == 200
    assert api.complete(only_adapter, MODEL).status_code == 404
    listed = api.call("GET", "/v1/models", only_adapter).json()["data"]
    assert [each["id"] for each in listed] == ["poet"]


def test_shared_adapter_serves_every_tenant_unless_it_has_its_own(
    stack: Stack, api: Api, poet: dict[str, Any], tmp_path: Path
) -> None:
    stack.key("ops")
    shared = api.register("ops", "poet", write_adapter(tmp_path / "a", alpha=2), is_shared=True)
    api.eventually(stack.key("other"), "poet", 200)
    assert shared["sha256"] != poet["sha256"]
    assert api.text(stack.key("other"), "poet") != api.text(stack.key(), "poet")
    again = {"name": "poet", "base_model": MODEL, "source": str(tmp_path / "a"), "is_shared": True}
    refused = api.call("POST", "/admin/tenants/other/adapters", api.admin, again)
    assert refused.status_code == 409
    assert api.call("DELETE", "/admin/tenants/ops/adapters/poet", api.admin).status_code == 200
    api.eventually(stack.key("other"), "poet", 404)


def test_price_and_ledger_are_those_of_the_adapter(
    stack: Stack, api: Api, poet: dict[str, Any]
) -> None:
    prices = {"prompt_micros": 10**6, "completion_micros": 5 * 10**6}
    added = api.call("POST", "/admin/prices", api.admin, {"model": poet["id"], **prices})
    assert added.status_code == 200
    deadline = time.monotonic() + PROCESS_PATIENCE_SECONDS
    while True:
        model = api.call("GET", "/v1/models/poet", stack.key()).json()
        if model["pricing"]["default"]["completion_micros"] == 5 * 10**6:
            break
        assert time.monotonic() < deadline, model
    done = api.complete(stack.key(), "poet", **{"x-include-cost": "true"}).json()
    usage = done["usage"]
    tokens = usage["prompt_tokens"], usage["completion_tokens"]
    query = "SELECT model, cost_micros FROM usage_ledger WHERE request_id = :id"
    while not (rows := execute(stack, query, id=done["id"])):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert rows == [(FULL_NAME, tokens[0] + 5 * tokens[1])]


@pytest.mark.usefixtures("poet")
def test_batch_runs_with_an_adapter(stack: Stack, api: Api, openai: OpenAI) -> None:
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}
    batch = wait_for(openai, create(openai, line("a", model="poet", **body)).id)
    done = results(openai, batch.output_file_id)["a"]["response"]["body"]
    assert done["choices"][0]["text"] == api.text(stack.key(), "poet")
    refused = wait_for(openai, create(openai, line("a", model="poets")).id)
    assert refused.status == "failed"


@pytest.mark.usefixtures("poet")
def test_adapter_that_no_worker_runs_is_listed_as_unserved(
    stack: Stack, api: Api, tmp_path: Path
) -> None:
    async def announce(max_rank: int) -> None:
        async with Redis.from_url(stack.redis.url) as redis:
            announced: Any = await redis.hget(keys.MODELS, MODEL)
            card = messages.decode_card(announced)
            assert card.adapters is not None
            support = AdapterSupport(max_rank, card.adapters.modules_digest)
            await FakeWorker(redis, "narrow").announce(adapters=support)

    async def remove() -> None:
        async with Redis.from_url(stack.redis.url) as redis:
            await Catalogue(redis).remove("narrow")

    asyncio.run(announce(max_rank=8))
    deadline = time.monotonic() + PROCESS_PATIENCE_SECONDS
    while api.call("GET", "/v1/models/narrow", stack.key()).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    source = write_adapter(tmp_path / "wide", alpha=5)
    wide = api.register("acme", "wide", source, base_model="narrow")
    assert (wide["state"], wide["rank"]) == ("ready", 4), wide
    asyncio.run(announce(max_rank=1))
    while (page := api.call("GET", "/v1/models/wide", stack.key()).json()).get("state") in (
        None,
        "ready",
    ):
        assert time.monotonic() < deadline, page
        time.sleep(0.05)
    assert (page["ready"], page["state"]) == (False, "no_worker")
    assert api.call("GET", "/v1/models/narrow", stack.key()).json()["ready"] is True
    refused = api.complete(stack.key(), "wide")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
    asyncio.run(remove())


def test_invalid_adapter_fails_with_its_reason(stack: Stack, api: Api, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "large", rank=32)
    failed = api.register("acme", "large", source)
    assert (failed["state"], failed["reason"]) == ("failed", "'r' must be at most 16. Given: 32.")
    missing = api.register("acme", "missing", str(tmp_path / "missing"))
    assert missing["reason"].startswith("The source must contain adapter_config.json")
    assert api.complete(stack.key(), "large").status_code == 404
    for body, code in (
        ({"name": "a:b", "base_model": MODEL, "source": source}, 400),
        ({"name": "x", "base_model": MODEL, "source": "relative"}, 400),
        ({"name": "x", "base_model": "unknown", "source": source}, 503),
        ({"name": MODEL, "base_model": MODEL, "source": source}, 409),
        ({"name": "large", "base_model": MODEL, "source": source}, 409),
    ):
        refused = api.call("POST", "/admin/tenants/acme/adapters", api.admin, body)
        assert refused.status_code == code, refused.text
    # Only operators name files of machines.
    assert api.call("POST", "/v1/adapters", stack.key(scopes=(Scope.KEYS,)), {}).status_code == 405


def test_customer_sees_and_deletes_own_adapters(stack: Stack, api: Api, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "short", alpha=4)
    added = run_sluice(
        stack,
        *("adapters", "add", "--tenant", "acme", "short", "--base-model", MODEL),
        *("--source", source),
    )
    assert "ready" in added
    api.eventually(stack.key(), "short", 200)
    owner = stack.key(scopes=(Scope.KEYS,))
    shown = api.call("GET", "/v1/adapters/short", owner).json()
    assert shown["state"] == "ready"
    assert "source" not in shown
    ids = [each["id"] for each in api.call("GET", "/v1/adapters", owner).json()["data"]]
    assert shown["id"] in ids
    assert api.call("DELETE", "/v1/adapters/short", owner).json()["deleted"] is True
    api.eventually(stack.key(), "short", 404)
    assert api.call("GET", "/v1/adapters/short", owner).status_code == 404
    actions = run_sluice(stack, "audit", "list")
    assert "adapter.register" in actions
    assert "adapter.delete" in actions


def test_load_failure_is_reported_and_not_repeated_for_ever(
    stack: Stack, api: Api, tmp_path: Path
) -> None:
    broken = api.register("acme", "broken", write_adapter(tmp_path / "broken", alpha=3))
    stored = Path(stack.environment["SLUICE_FILE_STORE"]) / "adapters" / broken["sha256"]
    weights = stored / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + b"\x01")
    before = metric(stack.worker_url(), "sluice_worker_adapter_loads_total")
    refused = api.eventually(stack.key(), "broken", 503)
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("adapter_failed", "service_unavailable")
    assert metric(stack.worker_url(), "sluice_worker_adapter_loads_total") == before + 1
    weights.write_bytes(content)
    api.eventually(stack.key(), "broken", 200)
