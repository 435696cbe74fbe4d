"""Whole responses over HTTP: what each parameter does, with the scripted engine."""

from typing import Any

import httpx
import pytest

from tests.gateway.conftest import complete
from tests.support.cases import all_cases


async def body_of(client: httpx.AsyncClient, **parameters: Any) -> dict[str, Any]:
    """Return the body of a response."""
    response = await complete(client, **parameters)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = response.json()
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return body


async def texts_of(client: httpx.AsyncClient, **parameters: Any) -> list[str]:
    """Return the texts of a response's choices, which must stand in order."""
    choices = (await body_of(client, **parameters))["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] for choice in choices]


async def test_response_has_the_format_of_openai(client: httpx.AsyncClient) -> None:
    body = await body_of(client, max_tokens=5)
    assert set(body) == {
        "id",
        "object",
        "created",
        "model",
        "system_fingerprint",
        "choices",
        "usage",
    }
    (choice,) = body["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert body["usage"]["completion_tokens"] == 5


async def test_default_is_sixteen_tokens(client: httpx.AsyncClient) -> None:
    body = await body_of(client, max_tokens=None)
    assert body["usage"]["completion_tokens"] == 16


async def test_same_seed_gives_the_same_text(client: httpx.AsyncClient) -> None:
    first, again, other = [await texts_of(client, seed=seed) for seed in (5, 5, 6)]
    assert first == again
    assert first != other
    assert await texts_of(client, seed=None) != await texts_of(client, seed=None)


async def test_choice_i_uses_seed_plus_i(client: httpx.AsyncClient) -> None:
    together = await texts_of(client, seed=10, n=3)
    alone = [(await texts_of(client, seed=10 + i))[0] for i in range(3)]
    assert together == alone


async def test_greedy_choices_are_the_same_and_each_counts(client: httpx.AsyncClient) -> None:
    body = await body_of(client, temperature=0, n=3, max_tokens=4)
    assert len({choice["text"] for choice in body["choices"]}) == 1
    assert body["usage"]["completion_tokens"] == 12


async def test_several_prompts_give_the_choices_of_single_ones_in_order(
    client: httpx.AsyncClient,
) -> None:
    prompts: list[Any] = ["One", [5, 6, 7], ["a", 9], ""]
    together = await texts_of(client, prompt=[[5], *prompts])
    alone = [
        (await texts_of(client, prompt=[5]))[0],
        *[(await texts_of(client, prompt=prompt))[0] for prompt in prompts],
    ]
    assert together == alone


async def test_usage_counts_each_prompt_once(client: httpx.AsyncClient) -> None:
    body = await body_of(client, prompt=[[5, 6], [7, 8, 9]], n=2, max_tokens=4)
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 16


async def test_best_of_returns_n_and_bills_all(client: httpx.AsyncClient) -> None:
    body = await body_of(client, n=2, best_of=6, max_tokens=5, logprobs=0, seed=3)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 30
    means = [sum(choice["logprobs"]["token_logprobs"]) / 5 for choice in body["choices"]]
    every = await body_of(client, n=6, max_tokens=5, logprobs=0, seed=3)
    all_means = sorted(
        (sum(choice["logprobs"]["token_logprobs"]) / 5 for choice in every["choices"]),
        reverse=True,
    )
    assert means == pytest.approx(all_means[:2])


async def test_whole_response_may_exceed_the_unread_bound_of_streams(
    impatient_client: httpx.AsyncClient,
) -> None:
    body = await body_of(impatient_client, n=100, temperature=1, max_tokens=70)
    assert body["usage"]["completion_tokens"] == 7000


@all_cases("parameters", [{"n": 127}, {"n": 128}])
async def test_response_that_may_need_too_much_memory_is_refused_early(
    client: httpx.AsyncClient, parameters: dict[str, Any]
) -> None:
    asked = {"best_of": 128, "max_tokens": 1900, "logprobs": 5} | parameters
    response = await complete(client, **asked)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "max_tokens"
    assert "243200 tokens, 6 log-probabilities each" in error["message"]
    assert error["message"].count("134217728") == 1


@all_cases("prompt", ["Once upon a time", [5, 6, 7], "Grüße 😀"])
async def test_echo_puts_the_prompt_first(client: httpx.AsyncClient, prompt: Any) -> None:
    (plain,) = await texts_of(client, prompt=prompt)
    (echoed,) = await texts_of(client, prompt=prompt, echo=True)
    assert echoed.endswith(plain)
    shown = echoed.removesuffix(plain)
    assert shown == prompt if isinstance(prompt, str) else shown


async def test_echo_alone_counts_no_completion(client: httpx.AsyncClient) -> None:
    body = await body_of(client, echo=True, max_tokens=0, logprobs=1)
    (choice,) = body["choices"]
    assert choice["text"] == "Once upon a time"
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@all_cases("echo", [False, True])
async def test_logprobs_are_parallel_lists_over_the_text(
    client: httpx.AsyncClient, echo: bool
) -> None:
    (choice,) = (await body_of(client, logprobs=2, echo=echo))["choices"]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len({len(values) for values in logprobs.values()}) == 1
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    scored = logprobs["token_logprobs"]
    assert (scored[0] is None) is echo
    for token, logprob, top in list(
        zip(logprobs["tokens"], scored, logprobs["top_logprobs"], strict=True)
    )[1:]:
        assert top[token] == logprob
        assert len(top) <= 3


async def test_logprobs_zero_reports_only_the_token(client: httpx.AsyncClient) -> None:
    (choice,) = (await body_of(client, logprobs=0))["choices"]
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"])


async def test_stop_ends_the_text_before_it(client: httpx.AsyncClient) -> None:
    (text,) = await texts_of(client, max_tokens=20)
    words = text.split(" ")
    stop = f" {words[4]}"
    body = await body_of(client, max_tokens=20, stop=["never said", stop])
    (choice,) = body["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert body["usage"]["completion_tokens"] < 20


async def test_two_gateways_give_the_same_response(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient
) -> None:
    assert await texts_of(client, n=2) == await texts_of(other_client, n=2)
