"""The endpoints of pooling models, with workers whose vectors are a function of the tokens."""

import asyncio
import base64
import math
import struct
from functools import partial
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from redis.asyncio import Redis
from tokenizers import Tokenizer

from gateway.billing.ledger.drain import Drain
from gateway.completions.prompt.inputs import JOB_INPUTS
from gateway.platform.database.engine import Database
from gateway.records.limits import LimitName
from tests.failures.chaos.run import RESUMED
from tests.gateway.conftest import MOST_WAITING_OF_TENANT, eventually, gateway_client
from tests.support.stack import CHECKPOINT, MODEL, Stack, metric

EMBEDDER, CLASSIFIER, SCORER = "embedder", "classifier", "scorer"
_CONVERTED = '{"convert": "classify"}'
_SCORES = '{"convert": "classify", "hf_overrides": {"num_labels": 1}}'
_ARGUMENTS = {EMBEDDER: "{}", CLASSIFIER: _CONVERTED, SCORER: _SCORES}
TEMPLATE = "{{ instruction }}{{ messages[0]['content'] }}{{ messages[1]['content'] }}"
"""How SCORER reads a pair."""
GENERATING = "/v1/completions, /v1/chat/completions, /v1/messages, /v1/responses"
WINDOW = 64
SIZE = 64
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def pooling_worker(arguments: str = "{}", **more: str) -> dict[str, str]:
    """Return the environment of a worker with the scripted engine that pools."""
    return {
        "SLUICE_ENGINE": "scripted",
        "SLUICE_RUNNER": "pooling",
        "SLUICE_ENGINE_ARGUMENTS": arguments,
        "SLUICE_CONTEXT_WINDOW": str(WINDOW),
        "SLUICE_SCRIPTED_STEP_SECONDS": "0.001",
        "SLUICE_TOOL_PARSER": "",
        "SLUICE_REASONING_PARSER": "",
        "SLUICE_LEASE_SECONDS": "60",
        **more,
    }


@pytest.fixture(scope="module", autouse=True)
def _workers(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    template = tmp_path_factory.mktemp("template") / "score.jinja"
    template.write_text(TEMPLATE)
    for name, arguments in _ARGUMENTS.items():
        given = {"SLUICE_CHAT_TEMPLATE": str(template)} if name == SCORER else {}
        stack.launch_worker(name, pooling_worker(arguments, SLUICE_MODEL_NAME=name, **given))
    for name in _ARGUMENTS:
        stack.await_worker(name)


@pytest.fixture
async def api(client: httpx.AsyncClient) -> "Api":
    """The endpoints, once their models are known."""
    api = Api(client)
    for name in _ARGUMENTS:
        await eventually(partial(api.is_ready, name), what=f"{name} being ready")
    return api


class Api:
    """Calls the endpoints."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def is_ready(self, model: str) -> bool:
        found = await self.client.get(f"/v1/models/{model}")
        return found.json().get("ready") is True

    async def post(self, path: str, model: str, **body: Any) -> Any:
        response = await self.client.post(path, json={"model": model} | body)
        assert response.status_code == 200, response.text
        return response.json()

    async def embed(self, *inputs: Any, **body: Any) -> list[Any]:
        """Return the vectors of inputs, in their order."""
        found = await self.post("/v1/embeddings", EMBEDDER, input=list(inputs), **body)
        assert [each["index"] for each in found["data"]] == list(range(len(inputs)))
        return [each["embedding"] for each in found["data"]]

    async def refusal(self, path: str, model: str, **body: Any) -> tuple[Any, Any, str]:
        """Return code, parameter and message of a 400."""
        response = await self.client.post(path, json={"model": model} | body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        return error["code"], error["param"], error["message"]


def tokens(*texts: str) -> int:
    return sum(len(TOKENIZER.encode(text).ids) for text in texts)


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


async def test_an_embedding_is_openai_s(api: Api) -> None:
    found = await api.post("/v1/embeddings", EMBEDDER, input="The capital of France")
    [item] = found.pop("data")
    vector = item.pop("embedding")
    assert item == {"object": "embedding", "index": 0}
    assert len(vector) == SIZE
    assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)
    used = tokens("The capital of France")
    assert found["usage"] == {"prompt_tokens": used, "total_tokens": used}
    assert (found["object"], found["model"]) == ("list", EMBEDDER)


async def test_base64_has_the_same_numbers_as_float(api: Api) -> None:
    [floats] = await api.embed("a text", encoding_format="float")
    [packed] = await api.embed("a text", encoding_format="base64")
    content = base64.b64decode(packed)
    assert list(struct.unpack(f"<{SIZE}f", content)) == floats


async def test_the_official_client_reads_vectors(stack: Stack, api: Api) -> None:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=stack.key()) as client:
        found = await client.embeddings.create(model=EMBEDDER, input=["one", "two"])
    assert [each.embedding for each in found.data] == await api.embed("one", "two")
    assert found.usage.prompt_tokens == tokens("one", "two")


async def test_many_inputs_keep_their_order(api: Api) -> None:
    texts = [f"text {number}" for number in range(100)]
    vectors = await api.embed(*texts)
    assert vectors[77] == (await api.embed("text 77"))[0]
    assert len({tuple(vector) for vector in vectors}) == len(texts)


async def test_token_ids_and_texts_are_the_same_input(api: Api) -> None:
    ids = TOKENIZER.encode("some words").ids
    [expected] = await api.embed("some words")
    assert await api.embed(ids, ids) == [expected, expected]
    found = await api.post("/v1/embeddings", EMBEDDER, input=ids)
    assert found["data"][0]["embedding"] == expected


async def test_messages_are_rendered(api: Api) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    found = await api.post("/v1/embeddings", EMBEDDER, messages=messages)
    rendered = await api.client.post(
        "/tokenize",
        json={"model": EMBEDDER, "messages": messages, "add_generation_prompt": False},
    )
    assert [found["data"][0]["embedding"]] == await api.embed(rendered.json()["tokens"])


async def test_dimensions_shorten_vectors(api: Api) -> None:
    [vector] = await api.embed("a text", dimensions=8)
    assert len(vector) == 8
    assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_long_input_is_cut_only_on_request(api: Api, side: str) -> None:
    ids = [5 + number % 90 for number in range(WINDOW + 3)]
    code, param, message = await api.refusal("/v1/embeddings", EMBEDDER, input=["a", *[ids]])
    assert (code, param) == ("context_length_exceeded", "input")
    assert f"'input[1]' has {WINDOW + 3} tokens" in message
    kept = ids[-WINDOW:] if side == "left" else ids[:WINDOW]
    for most, number in ((-1, WINDOW), (WINDOW, WINDOW), (5, 5)):
        options = {"truncate_prompt_tokens": most, "truncation_side": side}
        kept = ids[-number:] if side == "left" else ids[:number]
        assert await api.embed(ids, **options) == await api.embed(kept)


async def test_a_long_text_is_cut_as_its_tokens(api: Api) -> None:
    text = "once upon a time " * 10_000
    code, _, message = await api.refusal("/v1/embeddings", EMBEDDER, input=text)
    assert code == "context_length_exceeded"
    assert "at least" in message
    kept = TOKENIZER.encode(text[:1_000]).ids[:WINDOW]
    assert await api.embed(text, truncate_prompt_tokens=-1) == await api.embed(kept)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["a", ""]}, "input", "'input[1]' must not be empty"),
        ({"input": [[]]}, "input", "'input[0]' must not be empty"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": ["a", 5]}, "input", "'input[1]' must be a text"),
        ({"input": {"text": "a"}}, "input", "must be a text"),
        ({"input": [5, 1 << 20]}, "input", "'input[1]' must be a token id from 0"),
        ({"input": [[5, -5]]}, "input", "'input[0][1]' must be a token id from 0"),
        ({"input": [[5], [-5]]}, "input", "'input[1][0]' must be a token id from 0"),
        ({}, "input", "Missing required parameter"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input", "messages"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions", f"at most {SIZE}"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format", "base64"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "stream": True}, "stream", "not supported"),
    ],
)
async def test_invalid_bodies_are_refused(
    api: Api, body: dict[str, Any], param: str, words: str
) -> None:
    _, named, message = await api.refusal("/v1/embeddings", EMBEDDER, **body)
    assert named == param
    assert words in message


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
async def test_labels_are_those_of_the_model(api: Api, path: str) -> None:
    found = await api.post(path, CLASSIFIER, input=["good", "bad"])
    for index, item in enumerate(found["data"]):
        probabilities = item["probs"]
        assert item["index"] == index
        assert item["num_classes"] == len(probabilities) == 3
        assert sum(probabilities) == pytest.approx(1, abs=1e-5)
        best = probabilities.index(max(probabilities))
        assert item["label"] == ["negative", "neutral", "positive"][best]
    assert found["usage"]["prompt_tokens"] == tokens("good", "bad")


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_scores_of_vectors_are_their_cosines(api: Api, path: str) -> None:
    query, *documents = await api.embed("a query", "first", "second")
    expected = [cosine(query, each) for each in documents]
    texts = ["first", "second"]
    found = await api.post(path, EMBEDDER, text_1="a query", text_2=texts)
    assert [each["index"] for each in found["data"]] == [0, 1]
    assert [each["score"] for each in found["data"]] == pytest.approx(expected, abs=1e-5)
    assert found["usage"]["prompt_tokens"] == tokens("a query", *texts)
    pairs = await api.post(path, EMBEDDER, queries=["a query", "first"], documents=texts)
    scores = [each["score"] for each in pairs["data"]]
    assert scores[0] == pytest.approx(expected[0], abs=1e-5)
    assert scores[1] == pytest.approx(cosine(*documents), abs=1e-5)


async def test_a_scorer_reads_pairs_in_its_template(api: Api) -> None:
    found = await api.post("/v1/score", SCORER, text_1="ab", text_2=["cd", "ef"])
    assert found["usage"]["prompt_tokens"] == tokens("abcd", "abef")
    same = await api.post("/v1/score", SCORER, text_1=["ab", "ab"], text_2=["ef", "cd"])
    scores = [each["score"] for each in found["data"]]
    assert [each["score"] for each in same["data"]] == scores[::-1]
    given = {"text_1": "ab", "text_2": "cd", "instruction": "z", "chat_template_kwargs": {"x": 1}}
    response = await api.client.post("/v1/score", json={"model": SCORER} | given)
    assert response.headers["x-ignored-params"] == "chat_template_kwargs.x"
    assert response.json()["usage"]["prompt_tokens"] == tokens("zabcd")
    code, param, message = await api.refusal("/v1/score", EMBEDDER, **given)
    assert (code, param) == ("unsupported_parameter", "instruction")
    assert message.endswith("has no score template that reads it. Write it into the query.")


@pytest.mark.parametrize(
    "body", [{"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, {"text_1": "a", "text_2": []}]
)
async def test_unpaired_texts_are_refused(api: Api, body: dict[str, Any]) -> None:
    _, param, _ = await api.refusal("/v1/score", EMBEDDER, **body)
    assert param in body


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked(api: Api, path: str) -> None:
    texts = ["first", "second", "third"]
    scores = await api.post("/v1/score", EMBEDDER, text_1="a query", text_2=texts)
    expected = sorted(
        ((each["score"], each["index"]) for each in scores["data"]), key=lambda pair: -pair[0]
    )
    documents = [{"text": "first"}, "second", "third"]
    found = await api.post(path, EMBEDDER, query="a query", documents=documents, top_n=2)
    results = found["results"]
    assert [(each["relevance_score"], each["index"]) for each in results] == expected[:2]
    shown = [each.get("document") for each in results]
    if path == "/v2/rerank":
        assert shown == [None, None]
    else:
        assert shown == [{"text": texts[index]} for _, index in expected[:2]]
    used = tokens("a query", *texts)
    assert found["usage"] == {"prompt_tokens": used, "total_tokens": used}
    assert found["meta"]["billed_units"] == {"input_tokens": used}


ESTIMATES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/embeddings", EMBEDDER, {"input": ["a", "b"], "dimensions": 8}, {"dimensions": 8}),
    ("/v1/classify", CLASSIFIER, {"input": "a"}, {"use_activation": None}),
    (
        "/score",
        SCORER,
        {"text_1": "a", "text_2": ["b", "c"], "instruction": "d"},
        {"instruction": "d"},
    ),
    ("/v2/rerank", EMBEDDER, {"query": "a", "documents": ["b"], "top_n": 1}, {"top_n": 1}),
]


@pytest.mark.parametrize(("path", "model", "body", "effective"), ESTIMATES)
async def test_an_estimate_equals_the_bill(
    api: Api,
    path: str,
    model: str,
    body: dict[str, Any],
    effective: dict[str, Any],
) -> None:
    estimate = await api.post(f"{path}:estimate", model, **body, colour=1)
    used = await api.post(path, model, **body)
    assert estimate["prompt_tokens"] == used["usage"]["prompt_tokens"]
    assert estimate["total_tokens_max"] == used["usage"]["total_tokens"]
    assert estimate["completion_tokens_max"] == estimate["max_tokens"] == 0
    assert estimate["ignored_parameters"] == ["colour"]
    assert effective.items() <= estimate["parameters"].items()
    assert estimate["cost"]["max_micros"] == estimate["cost"]["prompt_micros"]
    refused = await api.client.post(f"{path}:estimate", json={"model": model} | body | {"user": 5})
    assert refused.json()["error"]["param"] == "user"


async def test_texts_of_a_comparison_are_cut(api: Api) -> None:
    query, document = "once upon a time there was", "a king who had three daughters"
    cut = {"max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    found = await api.post("/rerank", EMBEDDER, query=query, documents=[document], **cut)
    assert found["usage"]["prompt_tokens"] == 5
    assert found["results"][0]["document"] == {"text": document}


@pytest.mark.parametrize(
    ("path", "model", "served"),
    [
        ("/v1/embeddings", MODEL, GENERATING),
        ("/rerank", MODEL, GENERATING),
        ("/v1/completions", EMBEDDER, "/v1/embeddings, /v1/rerank, /v1/score"),
        ("/v1/chat/completions", CLASSIFIER, "/v1/classify"),
        ("/v1/embeddings", CLASSIFIER, "/v1/classify"),
        ("/v1/score", CLASSIFIER, "/v1/classify"),
        ("/v1/classify", EMBEDDER, "/v1/embeddings, /v1/rerank, /v1/score"),
    ],
)
async def test_a_model_of_another_kind_names_its_endpoints(
    api: Api, path: str, model: str, served: str
) -> None:
    texts: dict[str, Any] = {"query": "a", "documents": ["a"], "text_1": "a", "text_2": "a"}
    texts |= {"input": "a", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    wanted = {
        "/v1/completions": ["prompt"],
        "/v1/chat/completions": ["messages"],
        "/rerank": ["query", "documents"],
        "/v1/score": ["text_1", "text_2"],
    }.get(path, ["input"])
    _, param, message = await api.refusal(path, model, **{name: texts[name] for name in wanted})
    assert param == "model"
    assert message.endswith(f"It serves {served}.")
    listed = (await api.client.get(f"/v1/models/{model}")).json()
    assert ", ".join(listed["endpoints"]) == served


async def test_the_model_list_has_the_task(api: Api) -> None:
    models = (await api.client.get("/v1/models")).json()["data"]
    tasks = {each["id"]: each["task"] for each in models}
    expected = {EMBEDDER: "embed", CLASSIFIER: "classify", SCORER: "classify", MODEL: "generate"}
    assert expected.items() <= tasks.items()


async def test_a_repeated_key_returns_the_response(api: Api) -> None:
    body = {"model": EMBEDDER, "input": ["once", "again"] * 40}
    headers = {"Idempotency-Key": "embed-once"}
    first = await api.client.post("/v1/embeddings", json=body, headers=headers)
    second = await api.client.post("/v1/embeddings", json=body, headers=headers)
    assert second.headers["idempotent-replayed"] == "true"
    assert second.json() == first.json()


@pytest.fixture(scope="module")
def limited_key(stack: Stack) -> str:
    """A key with a limit of ten tokens per minute."""
    return stack.key("short", limits={LimitName.TOKENS_PER_MINUTE: 10})


async def test_prompt_tokens_are_limited(stack: Stack, limited_key: str) -> None:
    async with gateway_client(stack.url, limited_key) as client:
        body = {"model": EMBEDDER, "input": [[5, 6, 7]] * 3}
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200
        refused = await client.post("/v1/embeddings", json=body)
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-remaining-tokens"] == "1"


async def test_no_result_is_lost_if_a_worker_is_killed(
    stack: Stack, api: Api, store: "Redis"
) -> None:
    slow = pooling_worker(
        SLUICE_MODEL_NAME="mortal",
        SLUICE_LEASE_SECONDS="1",
        SLUICE_MAX_SEQUENCES="8",
        SLUICE_SCRIPTED_STEP_SECONDS="0.1",
    )
    for name in ("mortal-1", "mortal-2"):
        stack.launch_worker(name, slow)
    for name in ("mortal-1", "mortal-2"):
        stack.await_worker(name)
    await eventually(lambda: api.is_ready("mortal"), what="mortal being ready")
    texts = [f"text {number}" for number in range(JOB_INPUTS * MOST_WAITING_OF_TENANT)]
    body = {"model": "mortal", "input": texts}
    began = metric(stack.operators, RESUMED)
    asking = asyncio.create_task(api.client.post("/v1/embeddings", json=body))

    def working() -> list[str]:
        """Return the workers that have sent some results of a job whose others are not computed."""
        urls = {name: stack.worker_url(name) for name in ("mortal-1", "mortal-2")}
        frames = "sluice_worker_frames_written_total"
        return [name for name, url in urls.items() if metric(url, frames) >= 2]

    await eventually(working, what="results")
    stack.kill(working()[0])
    found = (await asking).json()
    assert metric(stack.operators, RESUMED) > began
    assert [each["embedding"] for each in found["data"]] == await api.embed(*texts)
    assert found["usage"]["prompt_tokens"] == tokens(*texts)
    database = Database(stack.database_url)
    await Drain(store, database).run()
    await database.aclose()
    receipt = (await api.client.get(f"/v1/usage/requests/{found['id']}")).json()
    billed = {"endpoint": "embeddings", "prompt_tokens": tokens(*texts), "completion_tokens": 0}
    assert billed.items() <= receipt.items()
