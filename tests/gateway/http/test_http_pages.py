"""Headers of responses, the list of models, probes, metrics and OpenAPI."""

import asyncio
import base64
import hashlib
import json
import re
from html import unescape
from importlib.metadata import version
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from redis.asyncio import Redis

from contract import sampling
from contract.dialect import Dialect
from contract.messages import Feature, WorkerState
from gateway.dialects.completions import CompletionRequest
from gateway.records.scopes import Scope
from tests.gateway.chats import CHATS, chatting
from tests.gateway.conftest import asking, complete, eventually, gateway_client, serve
from tests.gateway.http_calls import message_of
from tests.support.cases import all_cases
from tests.support.events import parse_chunks
from tests.support.stack import MODEL, Stack

GIVEN_ID = "my-Request_1.2"
TRUNCATE = {"context_length_exceeded_behavior": "truncate"}


@all_cases("given", [GIVEN_ID, "x", "x" * 128])
async def test_well_formed_request_id_is_echoed(client: httpx.AsyncClient, given: str) -> None:
    for stream in (False, True):
        response = await client.post(
            "/v1/completions",
            json=asking(max_tokens=1, stream=stream),
            headers={"x-request-id": given},
        )
        assert response.headers["x-request-id"] == given


async def test_correlation_id_stands_for_a_request_id(client: httpx.AsyncClient) -> None:
    for headers, request_id, correlation_id in (
        ({"x-correlation-id": "c-1"}, "c-1", "c-1"),
        ({"x-correlation-id": "c-1", "x-request-id": "r-1"}, "r-1", "c-1"),
        ({"x-correlation-id": "c 1", "x-request-id": "r-1"}, "r-1", None),
    ):
        for method, path in (("GET", "/healthz"), ("POST", "/v1/completions")):
            response = await client.request(method, path, json=asking(), headers=headers)
            assert response.headers.get_list("x-request-id") == [request_id]
            assert response.headers.get("x-correlation-id") == correlation_id


@all_cases("given", ["", "x" * 129, "a b", "a\tb", "é", "a/b", "a;b"])
async def test_other_request_id_is_replaced(client: httpx.AsyncClient, given: str) -> None:
    response = await client.get("/healthz", headers={b"x-request-id": given.encode("latin-1")})
    assert re.fullmatch(r"req_[0-9a-f]{24}", response.headers["x-request-id"])


async def test_every_request_gets_its_own_id(client: httpx.AsyncClient) -> None:
    ids = {(await client.get("/healthz")).headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5


@all_cases(
    ("parameters", "applied"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_tokens": 10**9, "prompt": [5] * 2040}, 8),
        ({"max_tokens": -1, "prompt": [5] * 2047}, 1),
        ({"max_tokens": 100, "prompt": [[5], [5] * 2043]}, 5),
    ],
)
@all_cases("stream", [False, True])
async def test_applied_max_tokens_are_reported(
    client: httpx.AsyncClient, parameters: dict[str, Any], applied: int, stream: bool
) -> None:
    response = await complete(client, stream=stream, **TRUNCATE, **parameters)
    assert response.status_code == 200
    assert response.headers["x-max-tokens-applied"] == str(applied)
    assert "x-prompt-truncated" not in response.headers


@all_cases("stream", [False, True])
async def test_cut_prompt_tokens_are_reported(client: httpx.AsyncClient, stream: bool) -> None:
    response = await complete(
        client, prompt=[[5] * 3000, [5]], truncate_sequence=True, max_tokens=8, stream=stream
    )
    assert response.status_code == 200
    assert response.headers["x-prompt-truncated"] == str(3000 - 2040)
    assert response.headers["x-max-tokens-applied"] == "8"


async def test_truncated_completion_uses_exactly_what_fits(client: httpx.AsyncClient) -> None:
    body = (await complete(client, prompt=[5] * 2040, max_tokens=100, **TRUNCATE)).json()
    assert body["usage"]["completion_tokens"] == 8
    assert body["choices"][0]["finish_reason"] == "length"


async def test_ignored_parameters_are_named(client: httpx.AsyncClient) -> None:
    response = await complete(client, zeta=1, n_keep=2, max_tokens=1)
    assert response.headers["x-ignored-params"] == "n_keep,zeta"
    assert "x-ignored-params" not in (await complete(client, max_tokens=1)).headers


async def test_names_cannot_break_out_of_the_header(client: httpx.AsyncClient) -> None:
    names = [
        "a\r\nx-evil: 1",
        "b\nset-cookie: c",
        "c,d",
        "é",
        "",
        " ",
        "n" * 193,
        "\x00",
        "fine.1-_",
        "messages[0].name",
    ]
    response = await complete(client, max_tokens=1, **dict.fromkeys(names, 1))
    assert response.headers["x-ignored-params"] == "fine.1-_,messages[0].name"
    assert not {"x-evil", "set-cookie"} & set(response.headers)


async def test_long_list_of_ignored_parameters_is_cut(client: httpx.AsyncClient) -> None:
    names = [f"p{number:04}" for number in range(200)]
    response = await complete(client, max_tokens=1, **dict.fromkeys(names, 1))
    assert response.headers["x-ignored-params"].split(",") == names[:32]


async def test_models_are_listed_as_workers_announce_them(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    await serve(store, "org/with-slash", WorkerState.DRAINING, context_window=99)
    await complete(client, model="org/with-slash")
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    models = {model["id"]: model for model in listed["data"]}
    tiny = models[MODEL]
    assert tiny["object"] == "model"
    assert (tiny["context_window"], tiny["max_model_len"], tiny["ready"]) == (2048, 2048, True)
    features = ["chat", "tools", "reasoning"]
    assert (tiny["features"], tiny["dialect"]) == (features, "openai")
    assert tiny["meta"] == {"n_vocab": 2048, "n_ctx": 2048, "n_ctx_train": 2048}
    assert not models["org/with-slash"]["ready"]
    for name, model in models.items():
        assert (await client.get(f"/v1/models/{name}")).json() == model


async def refresh_catalogue(client: httpx.AsyncClient) -> None:
    """Make the gateway read the latest announcements of workers."""
    unknown = await client.post("/tokenize", json={"model": "gpt-9", "prompt": "a"})
    assert unknown.status_code == 404


async def test_models_list_their_parameters_and_refuse_the_others(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    able: dict[str, Any] = {"features": list(Feature), "image_token": "<image>", "max_images": 2}
    await serve(store, "able", **able)
    # Its tokenizer is not published.
    await serve(store, "bare", tokenizer_digest="")
    await refresh_catalogue(client)
    listed = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
    assert listed["able"]["features"] == list(Feature)
    assert set(listed["able"]["supported_parameters"]) == set(CompletionRequest.model_fields)
    assert {"audio", "use_beam_search"} <= set(listed["able"]["unsupported_parameters"])
    assert {"audio", "best_of"} <= set(listed["able"]["unsupported_chat_parameters"])
    tiny = set(listed[MODEL]["supported_parameters"])
    assert {"temperature", "suffix", "tools", "logit_bias"} <= tiny
    without = {"mirostat", "xtc_probability", "grammar", "json_schema", "images"}
    assert tiny.isdisjoint(without)
    assert tiny - set(listed["bare"]["supported_parameters"]) >= {"suffix", "tools"}
    asked: list[dict[str, Any]] = [
        {"mirostat": 2},
        {"json_schema": {}},
        {"grammar": 'root ::= "a"'},
    ]
    for parameters in asked:
        refused = await complete(client, **parameters)
        [name] = parameters
        assert refused.status_code == 400
        assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == (
            *("unsupported_parameter", name),
        )


async def test_models_report_their_dialect_and_are_found_by_alias(
    client: httpx.AsyncClient, stack: Stack, store: "Redis"
) -> None:
    await serve(store, "spoken", dialect="llamacpp", aliases=["vendor/spoken"])
    await refresh_catalogue(client)
    page = (await client.get("/v1/models/vendor/spoken")).json()
    assert (page["id"], page["dialect"], page["aliases"]) == (
        *("spoken", "llamacpp"),
        ["vendor/spoken"],
    )
    listed = (await client.get("/v1/models")).json()["data"]
    aliases = {model["id"]: model["aliases"] for model in listed}
    assert (aliases["spoken"], aliases[MODEL]) == (["vendor/spoken"], [])
    own = await asyncio.to_thread(stack.key, "acme", dialect=Dialect.OMLX)
    async with gateway_client(stack.url, own) as client_of_dialect:
        page = (await client_of_dialect.get("/v1/models/spoken")).json()
        assert page["dialect"] == "omlx"
    limited = await asyncio.to_thread(stack.key, "acme", allowed_models=["something"])
    async with gateway_client(stack.url, limited) as limited_client:
        assert (await limited_client.get("/v1/models/vendor/spoken")).status_code == 404


async def test_unknown_model_has_no_page(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/models/gpt-9")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_models_have_the_form_of_openrouter(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    await serve(store, "seeing", features=[Feature.CHAT, Feature.STRUCTURE, Feature.IMAGES])
    await refresh_catalogue(client)
    listed = (await client.get("/v1/models", params={"format": "openrouter"})).json()["data"]
    models = {model["id"]: model for model in listed}
    tiny, seeing = models[MODEL], models["seeing"]

    assert tiny["quantization"] == "bf16", "from the setting"
    assert (tiny["name"], tiny["context_length"], tiny["max_output_length"]) == ("Tiny", 2048, 512)
    assert tiny["supported_features"] == ["tools", "reasoning", "logprobs"]
    assert {"temperature", "top_k", "stop", "max_tokens"} <= {
        *tiny["supported_sampling_parameters"]
    }
    assert tiny["is_ready"]
    assert seeing["input_modalities"] == ["text", "image"]
    assert seeing["supported_features"] == ["json_mode", "structured_outputs", "logprobs"]
    assert "quantization" not in seeing
    other = await client.get("/v1/models", params={"format": "other"})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "format")


async def test_invocations_are_completions_and_chats(client: httpx.AsyncClient) -> None:
    completion = await client.post("/invocations", json=asking(max_tokens=1))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    chat = await client.post("/invocations", json=body)
    assert completion.json()["object"] == "text_completion"
    assert chat.json()["object"] == "chat.completion"


async def test_probes_need_no_key(stack: Stack) -> None:
    async with gateway_client(stack.url, None) as anonymous:
        assert (await anonymous.get("/healthz")).json() == {"status": "ok"}
        assert (await anonymous.get("/readyz")).json() == {"status": "ready"}
        assert (await anonymous.get("/openapi.json")).status_code == 200
        probes = [("GET", "/health"), ("GET", "/v1/health"), ("GET", "/ping"), ("POST", "/ping")]
        for method, path in probes:
            probe = await anonymous.request(method, path)
            assert (probe.status_code, probe.json()) == (200, {"status": "ok"}), (method, path)
        assert (await anonymous.get("/version")).json() == {"version": version("sluice")}
        assert (await anonymous.get("/load")).json()["server_load"] >= 0
        for path in ("/health", "/ping", "/version", "/load"):
            head = await anonymous.head(path)
            assert (head.status_code, head.content) == (200, b"")
        allowed = (await anonymous.delete("/ping")).headers["allow"]
        assert set(allowed.split(", ")) == {"GET", "HEAD", "POST"}


@all_cases("path", ["/openapi.json", "/docs", "/docs/reference.js"])
async def test_documents_are_not_sent_again_to_those_who_have_them(stack: Stack, path: str) -> None:
    async with gateway_client(stack.url, None) as anonymous:
        page = await anonymous.get(path)
        head = await anonymous.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) == len(page.content)
        tag = head.headers["etag"]
        again = await anonymous.get(path, headers={"if-none-match": f'"other", {tag}'})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        changed = await anonymous.get(path, headers={"if-none-match": '"other"'})
        assert (changed.status_code, changed.content) == (200, page.content)


async def test_operators_have_a_separate_listener(stack: Stack) -> None:
    key = await asyncio.to_thread(stack.key, "operators", scopes=frozenset(Scope))
    async with gateway_client(stack.url, key) as customers:
        for path in ("/metrics", "/admin/tenants", "/admin/usage"):
            missing = await customers.get(path)
            message_of(missing, status=404, kind="invalid_request_error", code="not_found")
        page = (await customers.get("/openapi.json")).text
        assert "/admin" not in page
    async with gateway_client(stack.operators, key) as operators:
        assert (await operators.get("/healthz")).json() == {"status": "ok"}
        assert (await operators.get("/readyz")).json() == {"status": "ready"}
        assert (await operators.get("/metrics")).status_code == 200
        assert (await operators.get("/admin/tenants")).status_code == 200
        assert (await operators.get("/docs")).status_code == 200
        paths = (await operators.get("/openapi.json")).json()["paths"]
        assert {path.split("/")[1] for path in paths} == {"admin"}
        assert (await operators.get("/v1/models")).status_code == 404


async def test_front_page_links_to_endpoints_that_exist(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    # Then a model is ready.
    await complete(client, max_tokens=1)
    for url, example in ((stack.url, "/v1/completions"), (stack.operators, "/admin/tenants")):
        async with gateway_client(url, None) as anonymous:
            page = await anonymous.get("/")
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            policy = page.headers["content-security-policy"]
            [style] = re.findall(r"<style>(.*)</style>", page.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
            assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
            assert f"curl {url}{example}" in page.text
            if url == stack.url:
                # The example works as it is, but for the key.
                named = re.findall(r'-d \'{"model": "([^"]+)", "prompt"', unescape(page.text))
                listed = (await client.get("/v1/models")).json()["data"]
                ready = {each["id"] for each in listed if each["ready"]}
                assert len(named) == 1
                assert named[0] in ready
            paths = re.findall(r'href="([^"]+)"', page.text)
            assert "/docs" in paths
            for path in paths:
                status = 401 if path.startswith(("/v1", "/admin")) else 200
                status = 303 if path == "/console" else status
                assert (await anonymous.get(path)).status_code == status, path
            body = (await anonymous.get("/", headers={"accept": "application/json"})).json()
            assert body["version"] == version("sluice")
            assert set(paths) < set(body.values())
            assert (await anonymous.head("/")).content == b""


async def test_errors_lead_to_the_page_of_their_code(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    for sent in (
        client.post("/v1/completions", json=asking(temperature=3)),
        client.post("/v1/completions", json=asking(temperature=3, stream=True)),
        client.get("/v1/nothing"),
        client.get("/docs/nothing"),
        client.get("/v1/models", headers={"authorization": "Bearer sk-made-up"}),
    ):
        refused = await sent
        code = refused.json()["error"]["code"]
        assert refused.headers["link"] == f'</docs/errors/{code}>; rel="help"'
        for url in (stack.url, stack.operators):
            async with gateway_client(url, None) as anonymous:
                page = await anonymous.get(f"/docs/errors/{code}")
                assert f"<h1><code>{code}</code></h1>" in page.text
                policy = page.headers["content-security-policy"]
                assert "script-src 'self';" in policy
                assert re.findall("<script.*?>", page.text) == [
                    '<script src="/docs/reference.js" defer>'
                ]


async def test_front_page_repeats_plain_hosts_only(stack: Stack) -> None:
    hosts = {"a-b.example:80": "a-b.example:80", "[::1]:8080": "[::1]:8080", "x$(reboot)": "HOST"}
    async with gateway_client(stack.url, None) as anonymous:
        for given, shown in hosts.items():
            page = await anonymous.get("/", headers={"host": given})
            assert f"curl http://{shown}/v1/completions" in page.text
            assert (given in page.text) == (given == shown)


async def test_metrics_count_served_requests(stack: Stack, client: httpx.AsyncClient) -> None:
    is_idle = {"sluice_gateway_requests_in_progress": 0, "sluice_gateway_jobs_in_flight": 0}

    async def idles() -> bool:
        found = await samples(stack)
        return {name: found[name] for name in is_idle} == is_idle

    await eventually(idles, what="the end of other requests")
    before = await samples(stack)
    await complete(client, max_tokens=5, prompt=[5, 6, 7])
    await complete(client, max_tokens=2, prompt=[5, 6, 7], stream=True)
    label = f'{{model="{MODEL}"}}'
    durations = f"sluice_gateway_request_duration_seconds_count{label}"
    after: dict[str, float] = {}

    def grown(sample: str) -> float:
        return after[sample] - before.get(sample, 0)

    async def both_are_counted() -> bool:
        after.update(await samples(stack))
        return grown(durations) == 2 and is_idle.items() <= after.items()

    await eventually(both_are_counted, what="both requests being counted")
    assert grown(f"sluice_gateway_completion_tokens_total{label}") == 7
    assert grown(f"sluice_gateway_prompt_tokens_total{label}") == 6
    assert grown(f"sluice_gateway_time_to_first_token_seconds_count{label}") >= 1
    ok = 'sluice_gateway_requests_total{code="ok",endpoint="completions",status="200"}'
    assert grown(ok) == 2
    assert after[f"sluice_queue_ready_workers{label}"] == 1


async def samples(stack: Stack) -> dict[str, float]:
    """Return every sample of a gateway's metrics."""
    async with gateway_client(stack.operators, None) as prometheus:
        lines = (await prometheus.get("/metrics")).text.splitlines()
    split = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in split}


@pytest.fixture(scope="module")
def schema(stack: Stack) -> dict[str, Any]:
    """The OpenAPI document, which is large."""
    document: dict[str, Any] = httpx.get(f"{stack.url}/openapi.json").json()
    return document


async def test_openapi_describes_every_parameter_with_range_and_default(
    schema: dict[str, Any],
) -> None:
    request = schema["components"]["schemas"]["CompletionRequest"]
    properties = request["properties"]
    assert set(properties) == set(CompletionRequest.model_fields)
    # What is required depends on the dialect.
    assert "required" not in request
    for name, value in properties.items():
        assert value.get("description"), f"{name} has no description"
        is_scalar = {"boolean", "integer", "number"}.intersection(value.get("type", []))
        if is_scalar and "Another name" not in value["description"]:
            assert "Default" in value["description"], f"{name} has no default"
    ranges = {
        "temperature": sampling.TEMPERATURE,
        "top_p": sampling.TOP_P,
        "top_k": sampling.TOP_K,
        "min_p": sampling.MIN_P,
        "n": sampling.N,
        "best_of": sampling.N,
        "seed": sampling.SEED,
        "presence_penalty": sampling.PRESENCE_PENALTY,
        "frequency_penalty": sampling.FREQUENCY_PENALTY,
        "repetition_penalty": sampling.REPETITION_PENALTY,
        "logprobs": sampling.LOGPROBS,
    }
    for name, bounds in ranges.items():
        shown = properties[name]
        number = shown.get("anyOf", [shown])[0]
        assert (number["minimum"], number["maximum"]) == bounds, name


async def test_openapi_references_all_resolve(schema: dict[str, Any]) -> None:
    references = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(schema)))
    assert "#/components/schemas/CompletionRequest" in references
    for reference in references:
        place: Any = schema
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
        # Whether all of them are schemas, test_documentation.py looks at.
        assert place
    assert schema["openapi"].startswith("3.1")
    operation = schema["paths"]["/v1/completions"]["post"]
    assert operation["security"] == [{"bearer": []}]
    assert "bearer" in schema["components"]["securitySchemes"]


async def test_openapi_agrees_with_the_accepted_bodies(
    client: httpx.AsyncClient, schema: dict[str, Any]
) -> None:
    request = schema["components"]["schemas"]["CompletionRequest"] | {
        "components": schema["components"]
    }
    validator = jsonschema.Draft202012Validator(request)
    bodies: list[dict[str, Any]] = [
        {},
        {"prompt": ["a", "b"]},
        {"prompt": [5, 6]},
        {"prompt": [[5], [6]]},
        {"prompt": [5, "a"]},
        {"prompt": ["a", 5]},
        {"stop": "x"},
        {"stop": ["x", "y"]},
        {"logit_bias": {"5": 1}},
        {"structured_outputs": None},
        {"n": 129},
        {"temperature": 2.5},
        {"stop": ["a"] * 65},
        {"prompt": {}},
    ]
    for parameters in bodies:
        body = asking(max_tokens=1, **parameters)
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code == 200) is validator.is_valid(body), parameters


async def test_responses_match_their_schema(
    client: httpx.AsyncClient, schema: dict[str, Any]
) -> None:
    responses = schema["paths"]["/v1/completions"]["post"]["responses"]
    for parameters, status in (({}, 200), ({"logprobs": 1, "n": 2}, 200), ({"n": 0}, 400)):
        answer = await complete(client, max_tokens=2, **parameters)
        assert answer.status_code == status
        described = responses[str(status)]["content"]["application/json"]["schema"]
        components = {"components": schema["components"]}
        jsonschema.validate(answer.json(), described | components)


async def test_chat_responses_match_their_schema(
    client: httpx.AsyncClient, schema: dict[str, Any]
) -> None:
    components = {"components": schema["components"]}
    operation = schema["paths"][CHATS]["post"]
    described_chunk = {"$ref": "#/components/schemas/ChatCompletionChunk"}
    request = jsonschema.Draft202012Validator(
        operation["requestBody"]["content"]["application/json"]["schema"] | components
    )
    asked: list[tuple[dict[str, Any], int]] = [
        ({}, 200),
        ({"logprobs": True, "top_logprobs": 1, "n": 2, "return_token_ids": True}, 200),
        ({"background": True}, 200),
        ({"n": 0}, 400),
        ({"messages": [{"role": "", "content": "a"}]}, 400),
    ]
    for parameters, status in asked:
        body = chatting(max_tokens=2, **parameters)
        answer = await client.post(CHATS, json=body)
        assert answer.status_code == status, answer.text
        assert request.is_valid(body) is (status == 200)
        described = operation["responses"][str(status)]["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json(), described | components)
        if status == 200:
            stream = await client.post(CHATS, json=body | {"stream": True, "background": False})
            for chunk in parse_chunks(stream.content):
                jsonschema.validate(chunk, described_chunk | components)


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/tokenize", "Tokens", {"model": MODEL, "prompt": "é", "return_token_strs": True}),
        ("/tokenize", "Tokens", {"content": "é", "with_pieces": True}),
        ("/tokenize", "Error", {"content": 5}),
        ("/detokenize", "Detokenized", {"model": MODEL, "tokens": [5]}),
        ("/detokenize", "Detokenized", {"tokens": [5]}),
        ("/detokenize", "Error", {"tokens": [5.5]}),
    ],
)
async def test_token_endpoints_match_their_schema(
    stack: Stack, schema: dict[str, Any], path: str, name: str, body: dict[str, Any]
) -> None:
    key = await asyncio.to_thread(stack.key, "acme", allowed_models=[MODEL])
    components = {"components": schema["components"]}
    request = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator(request | components)
    assert validator.is_valid(body) is (name != "Error")
    async with gateway_client(stack.url, key) as client:
        answer = (await client.post(path, json=body)).json()
    reference = {"$ref": f"#/components/schemas/{name}"}
    jsonschema.validate(answer, reference | components)


async def test_models_match_their_schema(client: httpx.AsyncClient, schema: dict[str, Any]) -> None:
    described = {"$ref": "#/components/schemas/ModelList", "components": schema["components"]}
    listed = (await client.get("/v1/models")).json()
    assert listed["data"]
    jsonschema.validate(listed, described)
