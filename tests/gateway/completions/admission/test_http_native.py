"""llama.cpp's own paths: its form of requests and responses over the same generation."""

import asyncio
import json
from itertools import accumulate
from typing import Any

import httpx
from redis.asyncio import Redis

from contract.messages import Feature
from tests.gateway.chats import HELLO, chatting, prompt_of, serve_chats
from tests.gateway.conftest import asking, gateway_client, serve
from tests.gateway.http_calls import message_of
from tests.support.cases import all_cases
from tests.support.fake_worker import chat_format
from tests.support.stack import MODEL, Stack

LLAMACPP = {"x-api-dialect": "llamacpp"}
INFILL = {"input_prefix": "def f(", "input_suffix": ")"}
POSTS: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": "a"},
    "/completions": {"prompt": "a"},
    "/infill": INFILL,
    "/chat/completions": {"messages": HELLO},
    "/apply-template": {"messages": HELLO},
}


async def ask(
    client: httpx.AsyncClient, path: str = "/completion", *, key: str = "", **parameters: Any
) -> httpx.Response:
    """Post a body to one of llama.cpp's own paths."""
    body = asking(max_tokens=None, n_predict=8) | parameters
    headers = LLAMACPP | {"x-event-ids": "true"} | ({"idempotency-key": key} if key else {})
    response = await client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def results_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the result in each event of a stream."""
    lines = response.text.split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


@all_cases("path", ["/completion", "/completions"])
async def test_completion_has_the_form_of_llamacpp(client: httpx.AsyncClient, path: str) -> None:
    response = await ask(client, path, n_keep=4, echo=True, tools=[{"a": 1}], temperature=0.5)
    result = response.json()

    assert response.headers["x-ignored-params"] == "echo,n_keep,tools"
    settings, timings = result.pop("generation_settings"), result.pop("timings")
    content = result.pop("content")
    assert content
    assert result == {
        "index": 0,
        "tokens": [],
        "id_slot": -1,
        "stop": True,
        "model": MODEL,
        "tokens_predicted": 8,
        "tokens_evaluated": result["tokens_evaluated"],
        "prompt": "Once upon a time",
        "has_new_line": "\n" in content,
        "truncated": False,
        "stop_type": "limit",
        "stopping_word": "",
        "tokens_cached": result["tokens_cached"],
    }
    assert timings["predicted_n"] == 8
    assert timings["prompt_n"] + timings["cache_n"] == result["tokens_evaluated"]
    assert (settings["temperature"], settings["top_k"], settings["seed"]) == (0.5, 40, 7)
    assert (settings["n_predict"], settings["n_ctx"]) == (8, 2048)


async def test_several_prompts_return_a_list(client: httpx.AsyncClient) -> None:
    results = (await ask(client, prompt=["a", "bb"], n_cmpl=2, return_tokens=True)).json()

    assert [result["index"] for result in results] == [0, 1, 2, 3]
    assert [result["prompt"] for result in results] == ["a", "a", "bb", "bb"]
    assert [len(result["tokens"]) for result in results] == [8] * 4


async def test_members_of_a_result_are_selected(client: httpx.AsyncClient) -> None:
    fields = ["content", "generation_settings/n_predict", "timings/none", "none"]
    whole = await ask(client, response_fields=fields)
    *_, final = results_of(await ask(client, response_fields=fields, stream=True))

    assert whole.json() == {"content": whole.json()["content"], "generation_settings/n_predict": 8}
    assert final == whole.json() | {"content": ""}
    body = asking(response_fields=fields)
    refused = await client.post("/v1/completions", json=body, headers=LLAMACPP)
    assert "POST /completion" in refused.json()["error"]["message"]


async def test_stream_ends_with_the_result_of_each_prompt(client: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"prompt": ["a", "bb"], "n_probs": 2, "temperature": 1}
    wholes = (await ask(client, **asked)).json()
    response = await ask(client, **asked, stream=True, timings_per_token=True)
    results = results_of(response)

    assert "[DONE]" not in response.text
    for whole in wholes:
        parts = [result for result in results if result["index"] == whole["index"]]
        *partial, final = parts
        assert final.keys() == whole.keys() - {"completion_probabilities"}
        assert (final["content"], final["tokens"], final["stop"]) == ("", [], True)
        assert final["generation_settings"] == whole["generation_settings"] | {
            "stream": True,
            "timings_per_token": True,
        }
        assert "".join(part["content"] for part in partial) == whole["content"]
        # Usually an event has one token; those that arrive together share an event.
        tokens = [token for part in partial for token in part["tokens"]]
        predicted = list(accumulate(len(part["tokens"]) for part in partial))
        assert predicted[-1] == len(tokens) == 8
        assert [part["tokens_predicted"] for part in partial] == predicted
        assert all(part["timings"]["predicted_n"] for part in partial)
        scores = [score for part in partial for score in part["completion_probabilities"]]
        assert scores == whole["completion_probabilities"]
        assert [score["id"] for score in scores] == tokens
        assert all(len(score["top_logprobs"]) == 2 for score in scores)


async def test_stop_string_is_reported(client: httpx.AsyncClient) -> None:
    text = (await ask(client)).json()["content"]
    result = (await ask(client, stop=[text[3:6], "\x00"])).json()

    assert (result["stop_type"], result["stopping_word"]) == ("word", text[3:6])
    assert result["content"] == text[: text.index(text[3:6])]


async def test_stored_result_is_replayed_at_every_gateway(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient
) -> None:
    parameters: dict[str, Any] = {"key": "native", "logit_bias": [[5, False], ["a", 1]]}
    first = (await ask(client, **parameters)).json()
    again = await ask(other_client, **parameters)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json() == first

    streamed = await ask(client, stream=True)
    [*_, (name, number)] = [
        line.removeprefix("id: ").split(":")
        for line in streamed.text.split("\n")
        if line.startswith("id: ")
    ]
    rest = await other_client.get(
        f"/v1/completions/{name}?stream=true&starting_after={int(number) - 1}"
    )
    assert results_of(rest) == results_of(streamed)[-1:]


@all_cases(
    ("parameters", "message"),
    [
        ({"n_probs": 2, "best_of": 2}, "'post_sampling_probs' cannot be combined with 'best_of'"),
        ({"n_probs": 2}, "'post_sampling_probs' is not supported by this model. It requires an "),
        ({"post_sampling_probs": 1}, "'post_sampling_probs' must be a boolean. Given: 1."),
    ],
)
async def test_probabilities_after_the_samplers_need_a_chain(
    client: httpx.AsyncClient, parameters: dict[str, Any], message: str
) -> None:
    body = asking(max_tokens=2, top_k=0, top_p=1, min_p=0, repeat_penalty=1)
    body |= {"post_sampling_probs": True} | parameters
    response = await client.post("/completion", json=body, headers=LLAMACPP)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


async def test_probabilities_need_a_number_of_them(client: httpx.AsyncClient) -> None:
    response = await ask(client, post_sampling_probs=True)
    assert response.headers["x-ignored-params"] == "post_sampling_probs"


@all_cases("path", POSTS)
async def test_path_belongs_to_the_dialect(client: httpx.AsyncClient, path: str) -> None:
    body = {"model": MODEL, **POSTS[path]}
    response = await client.post(path, json=body)
    message = message_of(response, status=404, kind="invalid_request_error", code="not_found")
    hint = f"Use POST /v1{path}. " if path in ("/chat/completions", "/completions") else ""
    assert message == (
        f"{hint}The route POST {path} belongs to dialect llamacpp, but this request is in dialect "
        "openai. Select llamacpp with the header 'X-Api-Dialect', or as the dialect of the key, "
        "the tenant or the model."
    )


@all_cases("path", ["/props", "/models"])
async def test_path_without_a_body_belongs_to_the_dialect(
    client: httpx.AsyncClient, path: str
) -> None:
    response = await client.get(path)
    message = message_of(response, status=404, kind="invalid_request_error", code="not_found")
    assert message.startswith("Use GET /v1/models. The" if path == "/models" else "The route")


async def test_dialect_of_the_model_opens_the_paths(stack: Stack, store: "Redis") -> None:
    await serve(store, "native-speaker", dialect="llamacpp")
    key = await asyncio.to_thread(stack.key, "natives", allowed_models=["native-speaker"])
    async with gateway_client(stack.url, key) as client:
        models = await client.get("/models")
        assert [model["id"] for model in models.json()["data"]] == ["native-speaker"]
        properties = (await client.get("/props")).json()
    async with gateway_client(stack.url, None) as client:
        for path in ("/models", "/props"):
            response = await client.get(path, headers={"x-api-key": key})
            assert response.status_code == 200, response.text
    assert properties["model_alias"] == properties["model_path"] == "native-speaker"
    assert properties["default_generation_settings"]["params"]["n_predict"] == -1
    assert properties["modalities"] == {"vision": False, "audio": False}
    assert (properties["chat_template"], properties["total_slots"]) == ("", 0)


async def test_chat_has_the_template_that_is_applied(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker, model = await serve_chats(store, form=chat_format(), features=[Feature.CHAT])
    properties = await client.get(f"/props?model={model}", headers=LLAMACPP)
    assert "messages" in properties.json()["chat_template"]
    body = chatting(model, messages=[*HELLO, {"role": "assistant", "content": "It is"}])
    rendered = await client.post("/apply-template", json=body | {"zeta": 1}, headers=LLAMACPP)
    assert rendered.headers["x-ignored-params"] == "zeta"
    prompt = rendered.json()["prompt"]
    assert prompt.endswith("It is")

    request = asyncio.create_task(client.post("/chat/completions", json=body, headers=LLAMACPP))
    claim = await worker.claim_one()
    assert prompt_of(claim) == prompt
    await worker.conclude(claim, " six.")
    assert (await request).json()["choices"][0]["message"]["content"] == " six."


async def test_error_has_the_form_of_llamacpp(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/infill", json={"model": MODEL, "input_prefix": "a"}, headers=LLAMACPP
    )
    assert response.status_code == 400
    assert response.json()["error"]["code"] == 400
    assert "input_suffix" in response.json()["error"]["message"]
