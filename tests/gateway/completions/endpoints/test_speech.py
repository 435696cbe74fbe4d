"""Transcriptions, with a worker that hears a word for each second of audio."""

from functools import partial
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.gateway.conftest import eventually
from tests.support.speech_model import sound, write
from tests.support.stack import MODEL, Stack

SPEECH = "speech"
PATH = "/v1/audio/transcriptions"
SHORT, LONG = sound(2.5), sound(70, quiet=(27.0, 55.0))


@pytest.fixture(scope="module", autouse=True)
def _worker(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("speech")
    write(folder)
    stack.launch_worker(SPEECH, speech_worker(str(folder)))
    stack.await_worker(SPEECH)


def speech_worker(folder: str) -> dict[str, str]:
    """Return the environment of a worker with the scripted engine that hears."""
    return {
        "SLUICE_ENGINE": "scripted",
        "SLUICE_RUNNER": "transcription",
        "SLUICE_MODEL_NAME": SPEECH,
        "SLUICE_MODEL_PATH": folder,
        "SLUICE_SCRIPTED_STEP_SECONDS": "0.001",
        "SLUICE_TOOL_PARSER": "",
        "SLUICE_REASONING_PARSER": "",
    }


@pytest.fixture
async def api(client: httpx.AsyncClient) -> httpx.AsyncClient:
    """The endpoints, once their model is known."""

    async def is_ready() -> bool:
        found = await client.get(f"/v1/models/{SPEECH}")
        return found.json().get("ready") is True

    await eventually(is_ready, what="the model of speech being ready")
    return client


async def send(
    client: httpx.AsyncClient, content: bytes = SHORT, path: str = PATH, **fields: Any
) -> httpx.Response:
    data = {"model": SPEECH, **{name.replace("__", "[]"): each for name, each in fields.items()}}
    return await client.post(path, files={"file": ("a.wav", content)}, data=data)


async def refusal(client: httpx.AsyncClient, *args: Any, **fields: Any) -> tuple[Any, Any, str]:
    response = await send(client, *args, **fields)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


@pytest.mark.parametrize("language", ["en", None])
async def test_a_transcription_is_openai_s(api: httpx.AsyncClient, language: str | None) -> None:
    response = await send(api, **({"language": language} if language else {}))
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
    assert (whole["task"], whole["language"], whole["duration"]) == ("transcribe", "en", 12.5)
    assert [(each["start"], each["end"]) for each in whole["segments"]] == [(0, 10), (10, 12.5)]
    assert [len(each["tokens"]) for each in whole["segments"]] == [10, 3]
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
    openai = AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=stack.key())
    file = ("long.wav", LONG)
    whole = await openai.audio.transcriptions.create(model=SPEECH, file=file, temperature=0)
    stream = await openai.audio.transcriptions.create(model=SPEECH, file=file, stream=True)
    events = [each async for each in stream]
    assert "".join(each.delta for each in events[:-1]) == whole.text  # type: ignore[union-attr]
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == whole.text
    assert events[-1].usage.seconds == whole.usage.seconds == 70  # type: ignore[union-attr]
    english = await openai.audio.translations.create(model=SPEECH, file=file)
    assert len(english.text.split()) == len(whole.text.split())


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
