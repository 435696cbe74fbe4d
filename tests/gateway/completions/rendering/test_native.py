"""Results in llama.cpp's own form: how they end."""

import json
from typing import Any

from contract.dialect import Dialect
from contract.messages import JobStarted
from contract.outcomes import FinishReason
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.form_registry import event_renderer
from gateway.dialects.request import ChatRequest, ResponseForm
from gateway.records.errors import ApiError
from tests.gateway.replies import LENGTH, STOP, completion, ended, failed, said
from tests.support.cases import all_cases

CHAT = ChatRequest(messages=[])


def native(**fields: Any) -> Any:
    """Make the fixed part of a response of llama.cpp's own completion."""
    answer = completion(dialect=Dialect.LLAMACPP, form=ResponseForm.NATIVE, **fields)
    answer.generation_settings["n_ctx"] = 5
    return answer


def results(*replies: Reply, skip: int = 0, **fields: Any) -> list[Any]:
    """Return the events for some replies, and those of a failure."""
    renderer = event_renderer(native(**fields), skip=skip)
    content = renderer.render(replies)
    if isinstance(renderer.failure, ApiError):
        content += renderer.render_failure(renderer.failure)
    return events_of(content)


def events_of(content: bytes) -> list[Any]:
    """Return the JSON of each event, without `[DONE]`."""
    lines = [event.split("\n")[0] for event in content.decode().split("\n\n")[:-1]]
    return [json.loads(line.removeprefix("data: ")) for line in lines if "[DONE]" not in line]


@all_cases(
    ("finish", "stop_reason", "expected"),
    [
        (STOP, None, ("eos", "", False)),
        (STOP, 12, ("eos", "", False)),
        (STOP, "b", ("word", "b", False)),
        (STOP, "repetition", ("limit", "", True)),
        (LENGTH, None, ("limit", "", True)),
    ],
)
def test_end_of_a_result(
    finish: FinishReason, stop_reason: int | str | None, expected: tuple[str, str, bool]
) -> None:
    end = said("\n", finish=finish, stop_reason=stop_reason)
    *_, final = results(said("a"), end, ended(), stop=["b"])
    assert (final["stop_type"], final["stopping_word"], final["truncated"]) == expected
    assert final["has_new_line"]


def test_limit_before_the_window_does_not_truncate() -> None:
    *_, final = results(said("a", finish=LENGTH), ended())
    assert (final["stop_type"], final["truncated"]) == ("limit", False)


def test_failure_ends_the_stream() -> None:
    partial, failure = results(said("a"), failed())
    assert partial["content"] == "a"
    assert failure["error"]["code"] == 503
    assert failure["usage"]["completion_tokens"] == 1


def test_events_that_the_client_has_are_left_out() -> None:
    replies = (said("a"), said("b", finish=STOP), ended(tokens=2))
    assert results(*replies, skip=1) == results(*replies)[1:]


@all_cases("chat", [None, CHAT], ids=["text", "chat"])
@all_cases("form", [ResponseForm.OPENAI, ResponseForm.NATIVE])
def test_processed_prompt_is_reported_before_its_tokens(
    chat: ChatRequest | None, *, form: ResponseForm
) -> None:
    answer = completion(
        chat=chat,
        form=form if chat is None else ResponseForm.OPENAI,
        prompt_texts=None if chat or form is ResponseForm.NATIVE else ["abc"],
        reports_progress=True,
    )
    replies = [
        Reply(0, JobStarted(1, 1, 9, 4, "class")),
        said("a"),
        said("b", finish=STOP),
        ended(),
    ]
    first, last, *others = events_of(event_renderer(answer).render(replies))
    assert first["prompt_progress"] == {"total": 9, "cache": 4, "processed": 4, "time_ms": 0}
    took = last["prompt_progress"].pop("time_ms")
    assert took > 0
    assert last["prompt_progress"] == {"total": 9, "cache": 4, "processed": 9}
    assert all("prompt_progress" not in event for event in others)
    rest = events_of(event_renderer(answer).render(replies[1:]))
    if chat is None:
        assert others == rest
    else:
        assert [first["choices"], *(event["choices"] for event in others)] == [
            event["choices"] for event in rest
        ]
