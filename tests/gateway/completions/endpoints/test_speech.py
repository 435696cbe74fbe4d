"""Transcriptions, with a worker that hears a word for each second of audio."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from openai import AsyncOpenAI
from redis.asyncio import Redis

from gateway.billing.ledger.drain import Drain
from gateway.billing.prices import PriceService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import connect
from gateway.records.limits import LimitName, LimitValues
from tests.e2e.clients.environments import NODE, PROGRAMS
from tests.failures.chaos.run import RESUMED
from tests.gateway.conftest import eventually, gateway_client
from tests.support.speech_model import sound, write
from tests.support.stack import MODEL, Stack, metric

SPEECH, MORTAL = "speech", "mortal-speech"
SECOND_MICROS = 100
PARTS = ("limit", "remaining", "reset")
PATH = "/v1/audio/transcriptions"
SHORT, LONG = sound(2.5), sound(70, quiet=(27.0, 55.0))


@pytest.fixture(scope="module", autouse=True)
def folder(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model of speech, which a worker serves at a price for each second."""

    async def add_price() -> None:
        database, redis = Database(stack.database_url), connect(stack.redis.url, max_connections=1)
        service = PriceService(database, ChangeAnnouncer(redis))
        for model in (SPEECH, MORTAL):
            await service.add(
                model, prompt_micros=0, completion_micros=0, audio_micros=SECOND_MICROS * 10**6
            )
        await redis.aclose()
        await database.aclose()

    folder = str(tmp_path_factory.mktemp("speech"))
    write(Path(folder))
    asyncio.run(add_price())
    stack.launch_worker(SPEECH, speech_worker(folder))
    stack.await_worker(SPEECH)
    return folder


def speech_worker(folder: str, **more: str) -> dict[str, str]:
    """Return the environment of a worker with the scripted engine that hears."""
    return {
        "SLUICE_ENGINE": "scripted",
        "SLUICE_RUNNER": "transcription",
        "SLUICE_MODEL_NAME": SPEECH,
        "SLUICE_MODEL_PATH": folder,
        "SLUICE_SCRIPTED_STEP_SECONDS": "0.001",
        "SLUICE_TOOL_PARSER": "",
        "SLUICE_REASONING_PARSER": "",
        **more,
    }


@pytest.fixture
async def api(client: httpx.AsyncClient) -> httpx.AsyncClient:
    """The endpoints, once their model is known."""
    await eventually(partial(is_ready, client, SPEECH), what="the model of speech being ready")
    return client


async def is_ready(client: httpx.AsyncClient, model: str) -> bool:
    """Return whether a gateway knows a model and its price."""
    found = (await client.get(f"/v1/models/{model}")).json()
    price = (found.get("pricing") or {}).get("default", {}).get("audio_micros")
    return found.get("ready") is True and price == SECOND_MICROS * 10**6


async def send(
    client: httpx.AsyncClient, content: bytes = SHORT, path: str = PATH, **fields: Any
) -> httpx.Response:
    given = {name.replace("__", "[]"): each for name, each in fields.items() if each is not None}
    data = {"model": SPEECH, **given}
    return await client.post(path, files={"file": ("a.wav", content)}, data=data)


async def refusal(client: httpx.AsyncClient, *args: Any, **fields: Any) -> tuple[Any, Any, str]:
    response = await send(client, *args, **fields)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


@pytest.mark.parametrize("language", ["en", None])
async def test_a_transcription_is_openai_s(api: httpx.AsyncClient, language: str | None) -> None:
    response = await send(api, language=language)
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert len(body["text"].split()) == 3
    assert body == {"text": body["text"].strip(), "usage": {"type": "duration", "seconds": 3}}


async def test_formats_tell_the_same(api: httpx.AsyncClient) -> None:
    made = {
        form: await send(api, sound(12.5), response_format=form, language="en")
        for form in ("verbose_json", "srt", "vtt", "text")
    }
    whole = made["verbose_json"].json()
    described = (await api.get("/openapi.json")).json()["components"]
    schema = {"$ref": "#/components/schemas/Transcription", "components": described}
    jsonschema.validate(whole, schema)
    assert whole.keys() == described["schemas"]["Transcription"]["properties"].keys()
    assert (whole["task"], whole["language"], whole["duration"]) == ("transcribe", "en", 12.5)
    assert [(each["start"], each["end"]) for each in whole["segments"]] == [(0, 10), (10, 12.5)]
    assert [len(each["tokens"]) for each in whole["segments"]] == [10, 3]
    for name in ("avg_logprob", "compression_ratio", "no_speech_prob", "temperature"):
        assert all(isinstance(each[name], float) for each in whole["segments"]), name
    assert all(-20 < each["avg_logprob"] < 0 for each in whole["segments"])
    # OpenAI's client for .NET reads other types of text as JSON.
    for form in ("srt", "vtt", "text"):
        assert made[form].headers["content-type"] == "text/plain; charset=utf-8"
    first, second = (each["text"].strip() for each in whole["segments"])
    assert whole["text"] == f"{first} {second}"
    assert made["srt"].text == (
        f"1\n00:00:00,000 --> 00:00:10,000\n{first}\n\n"
        f"2\n00:00:10,000 --> 00:00:12,500\n{second}\n\n"
    )
    assert made["vtt"].text.startswith(f"WEBVTT\n\n00:00:00.000 --> 00:00:10.000\n{first}\n\n")
    assert len(made["text"].text.split()) == 13


async def test_long_audio_is_cut_at_quiet_points(api: httpx.AsyncClient) -> None:
    whole = (await send(api, LONG, response_format="verbose_json")).json()
    starts = [each["start"] for each in whole["segments"]]
    assert whole["usage"]["seconds"] == 70
    assert whole["segments"][-1]["end"] == 70
    assert starts == sorted(starts)
    assert any(27.0 < start < 27.2 for start in starts)
    assert any(55.0 < start < 55.2 for start in starts)


async def test_the_official_client_reads_whole_and_streamed_text(
    stack: Stack, api: httpx.AsyncClient
) -> None:
    file = ("long.wav", LONG)
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=stack.key()) as openai:
        create = openai.audio.transcriptions.create
        whole = await create(model=SPEECH, file=file, temperature=0)
        stream = await create(model=SPEECH, file=file, stream=True)
        events = [each async for each in stream]
    assert "".join(each.delta for each in events[:-1]) == whole.text  # type: ignore[union-attr]
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == whole.text
    assert events[-1].usage.seconds == whole.usage.seconds == 70  # type: ignore[union-attr]


@pytest.mark.slow
@NODE.skip
async def test_the_official_client_for_node_reads_each_form(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "long.wav"
    file.write_bytes(LONG)
    program = "transcriptions.mjs"
    (tmp_path / program).write_text((PROGRAMS / program).read_text())
    key = await asyncio.to_thread(stack.key, "node")
    environment = {"OPENAI_BASE_URL": f"{stack.url}/v1", "OPENAI_API_KEY": key}
    run = partial(NODE.run, ("node", program), tmp_path, **environment)
    found = json.loads(await asyncio.to_thread(run, MODEL=SPEECH, FILE=str(file)))
    whole, verbose, events = found["whole"], found["verbose"], found["events"]
    assert whole["usage"] == verbose["usage"] == {"type": "duration", "seconds": 70}
    assert (verbose["duration"], verbose["segments"][-1]["end"]) == (70, 70)
    assert "".join(each["delta"] for each in events[:-1]) == whole["text"]
    assert events[-1] == {**whole, "type": "transcript.text.done"}


async def test_a_translation_has_its_task(api: httpx.AsyncClient) -> None:
    path = "/v1/audio/translations"
    whole = (await send(api, path=path, response_format="verbose_json", language="de")).json()
    assert (whole["task"], whole["language"]) == ("translate", "en")


@pytest.mark.parametrize(
    ("content", "fields", "param", "message"),
    [
        (b"RIFF", {}, "file", "is damaged, has no audio"),
        (b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", {}, "file", "is in none of these formats"),
        (sound(0.05), {}, "file", "at least 0.1 seconds of audio. Given: 0.050"),
        (sound(95, rate=8000), {}, "file", "at most 90 seconds of audio"),
        (SHORT, {"language": "xx"}, "language", 'be one of de, en, ja. Given: "xx"'),
        (SHORT, {"language": "English"}, "language", "be a code of ISO 639-1"),
        (SHORT, {"temperature": "1.5"}, "temperature", "must be at most 1"),
        (SHORT, {"response_format": "diarized_json"}, "response_format", "must be one of 'json'"),
        (SHORT, {"stream": "true", "response_format": "srt"}, "response_format", "json or text"),
        (SHORT, {"timestamp_granularities__": "word"}, "timestamp_granularities[]", "of words"),
        (SHORT, {"timestamp_granularities__": "segment"}, "timestamp_granularities[]", "verbose_"),
        (SHORT, {"include__": "logprobs"}, "include[]", "log-probabilities"),
        (SHORT, {"chunking_strategy": "server_vad"}, "chunking_strategy", "must be auto"),
        (SHORT, {"model": MODEL}, "model", "does not serve /v1/audio/transcriptions"),
    ],
)
async def test_what_cannot_be_served_is_refused(
    api: httpx.AsyncClient, content: bytes, fields: dict[str, str], param: str, message: str
) -> None:
    status, named, text = await refusal(api, content, **fields)
    assert (status, named) == (400, param)
    assert message in text


async def test_a_form_without_a_file_or_another_body_is_refused(api: httpx.AsyncClient) -> None:
    without = await api.post(PATH, files={"model": (None, SPEECH)})
    assert without.json()["error"]["param"] == "file"
    assert (await api.post(PATH, json={"model": SPEECH})).status_code == 415
    completion = await api.post("/v1/completions", json={"model": SPEECH, "prompt": "a"})
    assert completion.json()["error"]["message"].endswith(
        "It serves /v1/audio/transcriptions, /v1/audio/translations."
    )


async def test_a_repeated_key_returns_the_transcription(api: httpx.AsyncClient) -> None:
    headers = {"idempotency-key": "speech-1"}
    files = {"file": ("a.wav", SHORT)}
    data = {"model": SPEECH, "response_format": "vtt"}
    post = partial(api.post, PATH, files=files, data=data, headers=headers)
    first, again = await post(), await post()
    assert again.headers["idempotent-replayed"] == "true"
    assert (first.text, first.headers["content-type"]) == (
        again.text,
        again.headers["content-type"],
    )


async def test_the_account_pays_for_seconds(api: httpx.AsyncClient, stack: Stack) -> None:
    headers = {"x-include-cost": "true"}
    files, data = {"file": ("a.wav", SHORT)}, {"model": SPEECH}
    response = await api.post(PATH, files=files, data=data, headers=headers)
    assert response.json()["usage"]["cost"] == 3 * SECOND_MICROS / 10**6
    # What is reserved while a file is decoded is free before its true seconds are reserved.
    limits: LimitValues = {
        LimitName.BUDGET: 70 * SECOND_MICROS - 1,
        LimitName.CONCURRENT_REQUESTS: 1,
    }
    poor = await asyncio.to_thread(stack.key, "poor", limits=limits)
    async with gateway_client(stack.url, poor) as client:
        refused = await send(client, LONG)
        assert (await send(client, SHORT)).status_code == 200
    limits = {LimitName.BUDGET: SECOND_MICROS - 1}
    poorest = await asyncio.to_thread(stack.key, "poorest", limits=limits)
    async with gateway_client(stack.url, poorest) as client:
        unread = await send(client, b"RIFF")
    for each in (refused, unread):
        assert (each.status_code, each.json()["error"]["code"]) == (429, "insufficient_quota")


async def test_a_limit_counts_seconds_of_audio(api: httpx.AsyncClient, stack: Stack) -> None:
    limits: LimitValues = {LimitName.AUDIO_SECONDS_PER_DAY: 75}
    limited = await asyncio.to_thread(stack.key, "limited", limits=limits)
    async with gateway_client(stack.url, limited) as client:

        async def used() -> int:
            (key, *_) = (await client.get("/v1/limits")).json()["scopes"]
            return int(key["limits"]["audio_seconds_per_day"]["used"])

        assert (await send(client, LONG)).status_code == 200
        # A model without audio reserves no seconds.
        assert (await send(client, SHORT, model=MODEL)).status_code == 400
        assert await used() == 70
        assert (await send(client, SHORT)).status_code == 200
        assert await used() == 73
        refused = await send(client, SHORT)
        assert await used() == 73
        too_long = await send(client, sound(80))
        # A file is decoded only if a second is left, which is free again if it is refused.
        assert (await send(client, b"RIFF")).status_code == 400
        assert await used() == 73
        assert (await send(client, sound(2))).status_code == 200
        assert (await send(client, b"RIFF")).status_code == 429
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["used"]) == (429, "audio_seconds", 73)
    assert error["message"].startswith("The limit of 75 audio seconds per day of the key ")
    assert ": 2 remain, and the request needs 3. It resets in " in error["message"]
    headers = {name: refused.headers[f"x-ratelimit-{name}-audio-seconds"] for name in PARTS}
    assert (headers["limit"], headers["remaining"]) == ("75", "2")
    assert int(refused.headers["retry-after"]) > 0
    assert too_long.headers["x-should-retry"] == "false"
    assert too_long.json()["error"]["message"].endswith(" Shorten the audio.")


async def test_no_second_is_lost_or_paid_twice_if_a_worker_is_killed(
    stack: Stack, api: httpx.AsyncClient, folder: str, store: "Redis"
) -> None:
    names = ("mortal-speech-1", "mortal-speech-2")
    slow = {"SLUICE_LEASE_SECONDS": "1", "SLUICE_SCRIPTED_STEP_SECONDS": "0.1"}
    for name in names:
        stack.launch_worker(name, speech_worker(folder, SLUICE_MODEL_NAME=MORTAL, **slow))
    for name in names:
        stack.await_worker(name)
    await eventually(partial(is_ready, api, MORTAL), what="the mortal model being ready")
    began = metric(stack.operators, RESUMED)
    asking = asyncio.create_task(send(api, LONG, model=MORTAL))

    def working() -> list[str]:
        """Return the workers that have sent some words of a clip that has others."""
        urls = {name: stack.worker_url(name) for name in names}
        frames = "sluice_worker_frames_written_total"
        return [name for name, url in urls.items() if metric(url, frames) >= 2]

    await eventually(working, what="words")
    stack.kill(working()[0])
    found = await asking
    assert metric(stack.operators, RESUMED) > began
    assert found.json()["text"] == (await send(api, LONG)).json()["text"]
    database = Database(stack.database_url)
    await Drain(store, database).run()
    await database.aclose()
    listed = (await api.get("/v1/usage/requests", params={"model": MORTAL})).json()["data"]
    billed = {"endpoint": "audio.transcriptions", "audio_seconds": 70, "free_audio_seconds": 0}
    assert [{**each, **billed} for each in listed] == listed
    assert [each["cost_micros"] for each in listed] == [70 * SECOND_MICROS]
