"""`usage` in the streams of every dialect, also of streams that fail."""

import json
from typing import Any

from contract.dialect import Dialect
from gateway.completions.rendering.sse import DONE, ChunkRenderer
from gateway.dialects.profile import PROFILES
from gateway.records.errors import GenerationFailedError
from tests.gateway.replies import LENGTH, STOP, completion, ended, failed, said
from tests.support.cases import all_cases
from tests.support.events import parse_chunks, split_events

COUNTS = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
FIREWORKS = [Dialect.FIREWORKS, Dialect.FIREWORKS_2026]


def chunks_of(dialect: Dialect, **fields: Any) -> list[dict[str, Any]]:
    """Render a stream of two choices whose second one ends first."""
    renderer = ChunkRenderer(completion(dialect=dialect, n=2, **fields))
    replies = [said("a"), said("b", choice=1, finish=STOP), said("c", finish=LENGTH), ended()]
    return parse_chunks(renderer.render(replies))


@all_cases("dialect", Dialect)
def test_conflict_17_usage_is_in_the_chunk_of_the_choice_that_finishes_last(
    dialect: Dialect,
) -> None:
    *others, final = chunks_of(dialect)
    assert all("usage" not in chunk for chunk in others)
    assert final["choices"][0]["index"] == 0
    assert final["choices"][0]["finish_reason"] == "length"
    assert final["usage"].items() >= COUNTS.items()


@all_cases("dialect", Dialect)
def test_conflict_17_include_usage_gives_openais_extra_chunk(dialect: Dialect) -> None:
    *others, final, extra = chunks_of(dialect, include_usage=True)
    assert extra["choices"] == []
    assert extra["usage"].items() >= COUNTS.items()
    assert [chunk["usage"] for chunk in others] == [None, None]
    assert final["choices"][0]["finish_reason"] == "length"
    if dialect in FIREWORKS:
        assert final["usage"] == extra["usage"]
    else:
        assert final["usage"] is None


@all_cases("dialect", Dialect)
@all_cases("include_usage", [False, True])
def test_continuous_usage_counts_the_tokens_of_each_choice(
    dialect: Dialect, *, include_usage: bool
) -> None:
    """As vLLM's server with `continuous_usage_stats`."""
    renderer = ChunkRenderer(
        completion(dialect=dialect, n=2, include_usage=include_usage, continuous_usage=True)
    )
    replies = [
        said("a", token_ids=[1, 2]),
        said("", token_ids=[3]),
        said("b", choice=1),
        said("c", choice=1, finish=STOP),
        said("d", finish=LENGTH),
        ended(tokens=6),
    ]
    chunks = parse_chunks(renderer.render(replies))
    if include_usage:
        extra = chunks.pop()
        assert extra["choices"] == []
        assert extra["usage"]["total_tokens"] == 3 + 6
    *others, final = [(chunk["choices"][0]["index"], chunk["usage"]) for chunk in chunks]
    assert others == [
        (index, {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens})
        for index, tokens in ((0, 2), (1, 1), (1, 2))
    ]
    is_whole = not include_usage or dialect in FIREWORKS
    assert final[1]["completion_tokens"] == (6 if is_whole else 4)


@all_cases("dialect", Dialect)
@all_cases("continuous_usage", [False, True])
def test_stream_of_a_client_that_declines_usage_has_none(
    dialect: Dialect, *, continuous_usage: bool
) -> None:
    fields: dict[str, Any] = {"hides_usage": True, "continuous_usage": continuous_usage}
    chunks = chunks_of(dialect, **fields)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks)

    renderer = ChunkRenderer(completion(dialect=dialect, **fields))
    renderer.render([said("a"), failed()])
    (event,) = parse_chunks(renderer.render_failure(GenerationFailedError("It failed.")))
    assert "error" in event
    assert "usage" not in event


def test_only_fireworks_keeps_usage_in_the_final_chunk() -> None:
    keeping = [name for name, profile in PROFILES.items() if profile.keeps_usage_in_final_chunk]
    assert keeping == FIREWORKS


def test_failure_reports_the_tokens_before_it() -> None:
    renderer = ChunkRenderer(completion(prompts=3))
    renderer.render(
        [
            said("a", prompt=1, finish=STOP, token_ids=[1, 2]),
            ended(prompt=1, prompt_tokens=7, tokens=2, cached=4),
            said("b"),
            said("", token_ids=[3, 4]),
            failed(),
        ]
    )
    assert renderer.failure is not None
    (event,) = parse_chunks(renderer.render_failure(renderer.failure))
    # Prompt 0 has three tokens and delivered three; prompt 2 never began.
    assert event["usage"] == {
        "prompt_tokens": 7 + 3,
        "completion_tokens": 2 + 3,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert event["error"]["code"] == "engine_dead"
    assert set(event) == {"error", "usage"}


def test_failure_with_include_usage_sends_the_extra_chunk_before_the_error() -> None:
    renderer = ChunkRenderer(completion(include_usage=True))
    renderer.render([said("a"), failed()])
    extra, event = parse_chunks(renderer.render_failure(GenerationFailedError("It failed.")))
    assert extra["choices"] == []
    assert extra["usage"]["completion_tokens"] == 1
    assert set(event) == {"error"}


@all_cases("include_usage", [False, True])
def test_failure_before_any_token_has_no_usage(include_usage: bool) -> None:
    renderer = ChunkRenderer(completion(include_usage=include_usage))
    (event,) = parse_chunks(renderer.render_failure(GenerationFailedError("It failed.")))
    assert set(event) == {"error"}


@all_cases("dialect", Dialect)
def test_failure_finishes_open_choices_for_fireworks_only(dialect: Dialect) -> None:
    renderer = ChunkRenderer(completion(dialect=dialect, n=3))
    renderer.render([said("a"), said("b", choice=1, finish=STOP), failed()])
    (event,) = parse_chunks(renderer.render_failure(GenerationFailedError("It failed.")))
    choices = [
        {"index": index, "text": "", "logprobs": None, "finish_reason": "error"} for index in (0, 2)
    ]
    assert event.get("choices") == (choices if dialect in FIREWORKS else None)


@all_cases(
    ("dialect", "kind", "code"),
    [
        (Dialect.OPENAI, "service_unavailable", "engine_dead"),
        (Dialect.FIREWORKS, "service_unavailable", "engine_dead"),
        (Dialect.LLAMACPP, "unavailable_error", 503),
        (Dialect.MISTRALRS, "service_unavailable", "engine_dead"),
        (Dialect.OMLX, "service_unavailable", "engine_dead"),
        (Dialect.VLLM, "ServiceUnavailableError", 503),
    ],
)
def test_conflict_18_error_event_has_the_style_of_its_dialect(
    dialect: Dialect, kind: str, code: int | str
) -> None:
    renderer = ChunkRenderer(completion(dialect=dialect))
    body = renderer.render_failure(GenerationFailedError("It failed."))
    event, done = split_events(body)
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert (error["message"], error["type"], error["code"]) == ("It failed.", kind, code)
    assert done == DONE
