"""Responses in the format of their dialect, through the whole gateway."""

from typing import Any

import httpx

from contract.dialect import Dialect
from tests.gateway.conftest import STEP_SECONDS, asking
from tests.support.cases import all_cases
from tests.support.events import parse_chunks, texts_by_choice


async def ask(client: httpx.AsyncClient, dialect: Dialect, **parameters: Any) -> httpx.Response:
    """Post a completion request in a dialect."""
    response = await client.post(
        "/v1/completions", json=asking(**parameters), headers={"x-api-dialect": str(dialect)}
    )
    assert response.status_code == 200, response.text
    return response


async def stream(
    client: httpx.AsyncClient, dialect: Dialect, **parameters: Any
) -> list[dict[str, Any]]:
    """Return the chunks of a streamed completion."""
    response = await ask(client, dialect, stream=True, **parameters)
    return parse_chunks(response.content)


async def test_conflict_20_fireworks_returns_times_in_headers_and_on_request_in_the_body(
    client: httpx.AsyncClient,
) -> None:
    response = await ask(client, Dialect.FIREWORKS, perf_metrics_in_response=True)
    metrics, usage = response.json()["perf_metrics"], response.json()["usage"]
    assert int(response.headers["fireworks-prompt-tokens"]) == usage["prompt_tokens"]
    assert metrics["prompt-tokens"] == usage["prompt_tokens"]
    took = float(response.headers["fireworks-server-processing-time"])
    assert 0 < float(response.headers["fireworks-server-time-to-first-token"]) <= took
    # Seven steps lie between the first token and the last; a late step shortens the next.
    assert 5 * STEP_SECONDS < metrics["generation-duration"] < took


async def test_conflict_20_llamacpp_returns_timings_in_every_chunk_on_request(
    client: httpx.AsyncClient,
) -> None:
    chunks = await stream(client, Dialect.LLAMACPP, timings_per_token=True, n_predict=4)
    predicted = [chunk["timings"]["predicted_n"] for chunk in chunks]
    assert predicted == sorted(predicted)
    assert predicted[-1] == 4
    assert (
        chunks[-1]["timings"]["prompt_n"] + chunks[-1]["timings"]["cache_n"]
        == (chunks[-1]["usage"]["prompt_tokens"])
    )


@all_cases(
    ("dialect", "name"),
    [(Dialect.OMLX, "time_to_first_token"), (Dialect.MISTRALRS, "total_time_sec")],
)
async def test_conflict_20_omlx_and_mistralrs_return_times_in_usage(
    client: httpx.AsyncClient, dialect: Dialect, name: str
) -> None:
    whole = (await ask(client, dialect)).json()["usage"]
    *_, final = await stream(client, dialect)
    assert whole[name] > 0
    assert final["usage"][name] > 0
    assert final["usage"].keys() == whole.keys()


@all_cases("dialect", Dialect)
async def test_conflict_17_every_stream_ends_with_its_usage(
    client: httpx.AsyncClient, dialect: Dialect
) -> None:
    *others, final = await stream(client, dialect, prompt=["a", "b"], n=2, max_tokens=3)
    assert all("usage" not in chunk for chunk in others)
    assert final["usage"]["completion_tokens"] == 12
    assert final["choices"][0]["finish_reason"] == "length"


async def test_conflict_09_literal_suffix_follows_echo_and_text(
    client: httpx.AsyncClient,
) -> None:
    parameters = {"echo": True, "suffix": "<end>", "n": 2, "max_tokens": 3}
    body = (await ask(client, Dialect.MISTRALRS, **parameters)).json()
    texts = {choice["index"]: choice["text"] for choice in body["choices"]}
    assert all(text.startswith("Once upon a time") for text in texts.values())
    assert all(text.count("<end>") == 1 and text.endswith("<end>") for text in texts.values())
    assert texts_by_choice(await stream(client, Dialect.MISTRALRS, **parameters)) == texts


async def test_echo_last_with_token_ids_and_log_probabilities_adds_up(
    client: httpx.AsyncClient,
) -> None:
    parameters = {
        "echo": True,
        "echo_last": 2,
        "logprobs": 1,
        "return_token_ids": True,
        "max_tokens": 3,
    }
    (choice,) = (await ask(client, Dialect.FIREWORKS, **parameters)).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["token_ids"] == choice["prompt_token_ids"][-2:] + choice["token_ids"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token


async def test_echo_of_the_last_no_tokens_is_no_echo(client: httpx.AsyncClient) -> None:
    parameters = {"max_tokens": 3}
    plain = (await ask(client, Dialect.FIREWORKS, **parameters)).json()
    echoed = (await ask(client, Dialect.FIREWORKS, echo=True, echo_last=0, **parameters)).json()
    assert echoed["choices"][0]["text"] == plain["choices"][0]["text"]


async def test_obfuscated_stream_has_chunks_of_equal_length(client: httpx.AsyncClient) -> None:
    response = await ask(
        client,
        Dialect.OPENAI,
        stream=True,
        stream_options={"include_obfuscation": True},
        max_tokens=6,
    )
    *chunks, _ = response.content.split(b"\n\n")[:-1]
    assert len({len(chunk) for chunk in chunks[:-1]}) == 1
    assert all("obfuscation" in chunk for chunk in parse_chunks(response.content))
