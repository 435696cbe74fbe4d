"""Responses in OpenAI's form: streams as its SDKs read them, and whole responses."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import httpx2
import msgspec
import openai
import pytest

from contract.dialect import Dialect
from contract.messages import CallPiece, TokenLogprob
from contract.outcomes import FailureCode
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.form_registry import collect, event_renderer
from gateway.completions.sealing import Sealer
from gateway.dialects.profile import PROFILES
from gateway.dialects.request import (
    CallForm,
    CallKind,
    ChatRequest,
    ResponseForm,
    ResponsesOptions,
    Tool,
    ToolMode,
    ToolUse,
)
from gateway.dialects.responses.failures import failed_stream, failure_of
from gateway.dialects.responses.request import read_response
from gateway.records.errors import (
    ApiError,
    AuthenticationError,
    BadRequestError,
    NoWorkerError,
    OutOfQuotaError,
    OverloadedError,
    StorageFullError,
    TenantQueueFullError,
    TokensExhaustedError,
)
from tests.gateway.completions.rendering.test_messages import called, events_of, thought
from tests.gateway.replies import LENGTH, STOP, completion, ended, failed, inbox, said
from tests.support.cases import all_cases, case
from tests.support.stream_decoders import CLIENTS

FORMS = {
    "patch": CallForm(CallKind.CUSTOM, "apply_patch"),
    "mcp__look": CallForm(CallKind.FUNCTION, "look", "mcp"),
    "tool_search": CallForm(CallKind.TOOL_SEARCH, "tool_search"),
    "local_shell": CallForm(CallKind.LOCAL_SHELL, "local_shell"),
    "shell": CallForm(CallKind.SHELL, "shell"),
}
USE = ToolUse([Tool(name, {}, is_strict=False) for name in ("a", *FORMS)], ToolMode.AUTO)
SEALER = Sealer(["a secret"])
TEXT = 'a "b"\n\\ é😀\u2028\t'
INPUT = json.dumps({"input": TEXT})
LAST = ended(prompt_tokens=10, tokens=2, cached=8)
END = said("", finish=STOP)
CUT = said("", finish=LENGTH)


def message(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": status, "content": [part]}


def reasoning(text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "summary": [], "content": content, "status": status}


def function(arguments: str, status: str = "completed", **more: Any) -> dict[str, Any]:
    call = {"type": "function_call", "name": "a", "arguments": arguments, "status": status}
    return call | more


def custom(text: str, status: str = "completed") -> dict[str, Any]:
    return {"type": "custom_tool_call", "name": "apply_patch", "input": text, "status": status}


KINDS: dict[str, tuple[list[Reply], list[dict[str, Any]]]] = {
    "text": ([said("Hel"), said("lo"), END], [message("Hello")]),
    "nothing": ([END], []),
    "blank": ([said(" "), said("\n"), END], []),
    "one delta": ([said("Hello", finish=STOP)], [message("Hello")]),
    "characters": ([said('"\\\n\u2028é'), said("😀"), END], [message('"\\\n\u2028é😀')]),
    "cut text": ([said("Hel"), CUT], [message("Hel", "incomplete")]),
    "thinking": ([*thought("a", "b"), said("c"), END], [reasoning("ab"), message("c")]),
    "thinking only": ([*thought("a"), END], [reasoning("a")]),
    "cut thinking": ([*thought("a"), CUT], [reasoning("a", "incomplete")]),
    "thinking again": (
        [*thought("a"), said("b"), *thought("c"), said("d"), END],
        [reasoning("a"), message("b"), reasoning("c"), message("d")],
    ),
    "call": ([*called(0, '{"x"', ":1}"), END], [function('{"x":1}')]),
    "call without arguments": ([*called(0), END], [function("")]),
    "call of a namespace": (
        [*called(0, "{}", name="mcp__look"), END],
        [function("{}", name="look", namespace="mcp")],
    ),
    "text and calls": (
        [said("Reading."), *called(0, "{}"), *called(1, '{"y":2}'), said("Done."), END],
        [message("Reading."), function("{}"), function('{"y":2}'), message("Done.")],
    ),
    "calls in one delta": (
        [said("", calls=[CallPiece(0, "a", '{"x":1}'), CallPiece(1, "patch", INPUT)]), END],
        [function('{"x":1}'), custom(TEXT)],
    ),
    "custom call": ([*called(0, *INPUT, name="patch"), END], [custom(TEXT)]),
    "custom call in pieces": (
        [*called(0, INPUT[:9], INPUT[9:20], INPUT[20:], name="patch"), END],
        [custom(TEXT)],
    ),
    "custom call with an empty text": (
        [*called(0, '{"input": ""}', name="patch"), END],
        [custom("")],
    ),
    "custom call of another form": (
        [*called(0, '{"patch"', ": 1}", name="patch"), END],
        [custom('{"patch": 1}')],
    ),
    "custom call of a long other form": (
        [*called(0, *['{"patch": "', *["a" * 1_000] * 9, '"}'], name="patch"), END],
        [custom('{"patch": "' + "a" * 9_000 + '"}')],
    ),
    "custom call without JSON": (
        [*called(0, "*** Begin", name="patch"), END],
        [custom("*** Begin")],
    ),
    "tool search": (
        [*called(0, '{"query"', ': "a"}', name="tool_search"), END],
        [
            {
                "type": "tool_search_call",
                "execution": "client",
                "arguments": {"query": "a"},
                "status": "completed",
            }
        ],
    ),
    "local shell": (
        [*called(0, '{"command": ["ls"]}', name="local_shell"), END],
        [
            {
                "type": "local_shell_call",
                "action": {"type": "exec", "command": ["ls"], "env": {}},
                "status": "completed",
            }
        ],
    ),
    "shell": (
        [*called(0, '{"commands": ["ls"]}', name="shell"), END],
        [{"type": "shell_call", "action": {"commands": ["ls"]}, "status": "completed"}],
    ),
    "cut call": ([*called(0, '{"x":1,"y":"ab'), CUT], [function('{"x":1,"y":"ab', "incomplete")]),
    "call that is whole at the cut": ([*called(0, "{}"), CUT], [function("{}")]),
    "cut custom call": (
        [*called(0, INPUT[:15], INPUT[15:22], name="patch"), CUT],
        [custom('a "b"\n\\', "incomplete")],
    ),
    "cut second call": (
        [*called(0, "{}"), *called(1, '{"y":'), CUT],
        [function("{}"), function('{"y":', "incomplete")],
    ),
    "broken call": ([*called(0, '{"x":1'), END], [function('{"x":1')]),
    "everything": (
        [
            *thought("a"),
            said("b"),
            *called(0, '{"x":[1,', '{"y":"é"}]}'),
            *thought("c"),
            *called(1, INPUT, name="patch"),
            END,
        ],
        [
            reasoning("a"),
            message("b"),
            function('{"x":[1,{"y":"é"}]}'),
            reasoning("c"),
            custom(TEXT),
        ],
    ),
}


def response(options: ResponsesOptions | None = None, **fields: Any) -> Completion:
    """Return what a response has before its replies."""
    echo = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}}
    known: dict[str, Any] = {
        "chat": ChatRequest(messages=[]),
        "form": ResponseForm.RESPONSES,
        "form_options": msgspec.structs.replace(
            options or ResponsesOptions(), echo=msgspec.json.encode(echo), calls=FORMS
        ),
        "tool_use": USE,
        "sealed_for": "model",
    }
    made = completion(**known | fields)
    seal = SEALER.seal_of("resp_1", made.request, tenant_id="acme")
    return msgspec.structs.replace(made, id="resp_1", seal=seal)


async def whole_of(replies: Sequence[Reply], made: Completion) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((await collect(made, inbox(*replies, LAST))).content)
    return body


def stream_of(replies: Sequence[Reply], made: Completion, **options: Any) -> bytes:
    """Return the stream that replies make, which arrive one at a time, after a silence each."""
    renderer = event_renderer(made, **options)
    parts = [renderer.opening()]
    for reply in [*replies, LAST]:
        if not options:
            parts.append(renderer.keep_alive() or b"")
        parts.append(renderer.render([reply]))
    assert renderer.finished
    return b"".join(parts)


def plain(model: Any) -> dict[str, Any]:
    values: dict[str, Any] = model.to_dict(mode="json", warnings=False)
    return values


def read_with_sdk(stream: bytes) -> dict[str, Any]:
    """Return the response that OpenAI's SDK reads from a stream."""
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(
        lambda _: httpx2.Response(200, headers=headers, content=stream)
    )
    with (
        httpx2.Client(transport=transport) as http,
        openai.OpenAI(api_key="k", base_url="http://localhost", http_client=http) as client,
        client.responses.stream(model="m", input="a") as reading,
    ):
        *events, last = [plain(each) for each in reading]
        if last["type"] == "response.completed":
            assert plain(reading.get_final_response()) == last["response"]
    assert events[0]["type"] == "response.created"
    read: dict[str, Any] = last["response"]
    return read


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in each.items() if k not in ("id", "call_id")} for each in items]


@all_cases("name", KINDS)
async def test_events_add_up_to_the_whole_response(name: str) -> None:
    replies, items = KINDS[name]
    whole = await whole_of(replies, response())
    assert without_ids(whole["output"]) == items
    is_cut = "cut" in name
    assert whole["status"] == ("incomplete" if is_cut else "completed")
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
    assert whole["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {
            "reasoning_tokens": whole["usage"]["output_tokens_details"]["reasoning_tokens"]
        },
        "total_tokens": 12,
    }
    events = events_of(stream_of(replies, response()))
    assert [each["sequence_number"] for each in events] == [*range(len(events))]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert events[-1]["response"] == whole
    added = [each for each in events if each["type"] == "response.output_item.added"]
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert [each["item"]["id"] for each in added] == [each["id"] for each in whole["output"]]
    assert [each["output_index"] for each in added] == [*range(len(added))]
    assert done == whole["output"]
    texts: dict[str, str] = {}
    for each in events:
        if each["type"].endswith(".delta"):
            texts[each["item_id"]] = texts.get(each["item_id"], "") + each["delta"]
    for item in whole["output"]:
        shown = item.get("arguments") or item.get("input") or ""
        if "content" in item:
            shown = item["content"][0]["text"]
        assert not isinstance(shown, str) or texts.get(item["id"], "") == shown


@all_cases("name", KINDS)
def test_python_reads_the_items(name: str) -> None:
    read = read_with_sdk(stream_of(KINDS[name][0], response()))
    for item in read["output"]:
        for part in item.get("content") or ():
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    assert without_ids(read["output"]) == KINDS[name][1]


@pytest.mark.skipif(
    not (shutil.which("node") and (CLIENTS / "node_modules" / "openai").is_dir()),
    reason="requires Node.js and tests/clients/node_modules",
)
def test_node_reads_the_items() -> None:
    streams = [stream_of(replies, response()).decode() for replies, _ in KINDS.values()]
    program = ["node", str(CLIENTS / "responses.mjs")]
    given = json.dumps(streams)
    ran = subprocess.run(program, input=given, capture_output=True, check=True, text=True)
    for (name, (_, items)), read in zip(KINDS.items(), json.loads(ran.stdout), strict=True):
        with case(name):
            for item in read["output"]:
                for part in item.get("content") or ():
                    part.pop("parsed", None)
                item.pop("parsed_arguments", None)
            assert without_ids(read["output"]) == items


@all_cases("name", KINDS)
def test_stream_resumes_after_any_event(name: str) -> None:
    replies = KINDS[name][0]
    everything = stream_of(replies, response(), has_ids=True)
    events = everything.split(b"\n\n")[:-1]
    for skip in range(len(events)):
        rest = stream_of(replies, response(), has_ids=True, skip=skip)
        assert rest.split(b"\n\n")[:-1] == events[skip:]
    # However many replies arrive at a time.
    renderer = event_renderer(response(), has_ids=True)
    assert renderer.render([*replies, LAST]) == everything
    # A keep-alive of a stream that can be resumed has the number of the last event.
    silence = events_of(renderer.keep_alive() or b"")
    assert silence[0]["sequence_number"] == len(events) - 1


NUMBER, TEXT_OR_NULL, COUNT_OR_NULL = (int, float), (str, type(None)), (int, type(None))
OPEN_RESPONSES: dict[str, Any] = {
    **dict.fromkeys(("id", "object", "status", "model", "truncation", "service_tier"), str),
    **dict.fromkeys(("created_at", "top_logprobs"), int),
    **dict.fromkeys(("completed_at", "max_output_tokens", "max_tool_calls"), COUNT_OR_NULL),
    **dict.fromkeys(("incomplete_details", "error", "usage", "reasoning"), (dict, type(None))),
    **dict.fromkeys(("previous_response_id", "instructions"), TEXT_OR_NULL),
    **dict.fromkeys(("safety_identifier", "prompt_cache_key"), TEXT_OR_NULL),
    **dict.fromkeys(("output", "tools"), list),
    **dict.fromkeys(("parallel_tool_calls", "store", "background"), bool),
    **dict.fromkeys(("top_p", "temperature"), NUMBER),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), NUMBER),
    **dict.fromkeys(("text", "metadata"), dict),
    "tool_choice": (str, dict),
}
"""The members of a response that the schema of Open Responses requires, and their types."""
OPEN_FUNCTION: dict[str, Any] = {
    **dict.fromkeys(("type", "name"), str),
    "description": TEXT_OR_NULL,
    "parameters": (dict, type(None)),
    "strict": bool,
}
OPEN_FORMAT: dict[str, Any] = {
    **dict.fromkeys(("type", "name"), str),
    "description": TEXT_OR_NULL,
    "schema": dict,
    "strict": bool,
}


def check_members(value: dict[str, Any], members: dict[str, Any]) -> None:
    for name, types in members.items():
        assert isinstance(value.get(name, ...), types), (name, value.get(name))


@all_cases(
    ("parameters", "tier"),
    [
        ({}, "default"),
        ({"service_tier": "priority", "presence_penalty": 1, "frequency_penalty": 0.5}, "priority"),
    ],
)
async def test_responses_have_the_members_that_open_responses_requires(
    parameters: dict[str, Any], tier: str
) -> None:
    function = {"type": "function", "name": "f", "strict": None}
    request = read_response(
        {
            "model": "m",
            "input": "a",
            "tools": [function, {"type": "namespace", "name": "n", "tools": [function]}],
            "tool_choice": {"type": "allowed_tools", "tools": [function]},
            "text": {"format": {"type": "json_schema", "schema": {}, "strict": None}},
        }
        | parameters,
        PROFILES[Dialect.OPENAI],
        max_prompts=1,
    )
    # Admission resolves the tier of the account.
    request = msgspec.structs.replace(request, service_tier=tier)
    made = msgspec.structs.replace(response(), request=request)
    replies, ends = [said("a"), END], [1_700_000_007, 1_600_000_000]
    bodies, completed = [], []
    for ended_at in ends:
        inputs = [*replies, ended(ended_at=ended_at)]
        content = (await collect(made, inbox(*inputs))).content
        events = events_of(event_renderer(made).render(inputs))
        last = events[-1]["response"]
        bodies += [json.loads(content), *(each["response"] for each in events[:2]), last]
        completed += [bodies[-4]["completed_at"], last["completed_at"]]
    for ending in ([said("a"), CUT, LAST], [said("a"), failed()]):
        renderer = event_renderer(made)
        stream = renderer.render(ending)
        if renderer.failure is not None:
            stream += renderer.render_failure(renderer.failure)
        bodies.append(events_of(stream)[-1]["response"])
        assert bodies[-1]["completed_at"] is None
    # The worker's clock may be behind.
    assert completed == [1_700_000_007] * 2 + [made.created] * 2
    for body in bodies:
        check_members(body, OPEN_RESPONSES)
        penalties = [parameters.get(f"{name}_penalty", 0) for name in ("presence", "frequency")]
        assert [body["presence_penalty"], body["frequency_penalty"]] == penalties
        assert body["service_tier"] == tier
        check_members(body["text"]["format"], OPEN_FORMAT)
        first, namespace = body["tools"]
        check_members(first, OPEN_FUNCTION)
        check_members(namespace["tools"][0], OPEN_FUNCTION)
        assert body["tool_choice"]["mode"] == "auto"
    # A stream that is refused before it begins.
    for each in events_of(failed_stream(OverloadedError("a"), "resp_1", "m") or b""):
        check_members(each["response"], OPEN_RESPONSES)


async def test_tokens_of_a_text_have_their_log_probabilities() -> None:
    def scored(text: str, *tokens: str, **more: Any) -> Reply:
        others = [("other", -1.0), ("third", -2.0)]
        listed = [
            TokenLogprob(each, -0.5, 0, [(each, -0.5), *others], [9, 8, 7]) for each in tokens
        ]
        return said(text, logprobs=listed, token_ids=[9] * len(tokens), **more)

    replies = [
        scored("", "<think>"),
        scored("", "a", reasoning="a", reasoning_tokens=2),
        scored("Hel", "</think>", "Hel", reasoning_tokens=1),
        scored("", ""),  # A part of a character.
        scored("lo", "lo"),
        scored("", "<call>"),
        scored("", "a", "{}", calls=[CallPiece(0, "a", "{}")]),
        scored("é", "é"),
        scored("", "<end>", finish=STOP),
    ]
    fields: dict[str, Any] = {"logprobs": 2}
    whole = await whole_of(replies, response(**fields))
    texts = [each["content"][0] for each in whole["output"] if each["type"] == "message"]
    shown = [[token["token"] for token in each["logprobs"]] for each in texts]
    assert shown == [["Hel", "", "lo"], ["é"]]
    assert texts[1]["logprobs"][0] == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            {"token": "other", "logprob": -1.0, "bytes": [*b"other"]},
        ],
    }
    stream = stream_of(replies, response(**fields))
    events = events_of(stream)
    assert events[-1]["response"] == whole
    for kind in ("delta", "done"):
        named = [each for each in events if each["type"] == f"response.output_text.{kind}"]
        tokens = [token for each in named for token in each["logprobs"]]
        assert tokens == [token for each in texts for token in each["logprobs"]]
    assert read_with_sdk(stream)["output"][1]["content"][0]["logprobs"] == texts[0]["logprobs"]
    everything = stream_of(replies, response(**fields), has_ids=True).split(b"\n\n")[:-1]
    for skip in range(len(everything)):
        rest = stream_of(replies, response(**fields), has_ids=True, skip=skip)
        assert rest.split(b"\n\n")[:-1] == everything[skip:]


async def test_sealed_reasoning_is_opened_in_the_next_turn() -> None:
    replies = KINDS["thinking again"][0]
    whole = await whole_of(replies, response(ResponsesOptions(has_sealed_reasoning=True)))
    sealed = [each["encrypted_content"] for each in whole["output"] if each["type"] == "reasoning"]
    opened = [SEALER.open(each, tenant_id="acme", model="model") for each in sealed]
    assert opened == ["a", "c"]


async def test_reasoning_is_a_summary_on_request() -> None:
    options = ResponsesOptions(has_summaries=True, wants_reasoning=True)
    replies = KINDS["thinking"][0]
    whole = await whole_of(replies, response(options))
    summary = [{"type": "summary_text", "text": "ab"}]
    assert without_ids(whole["output"][:1]) == [
        {"type": "reasoning", "summary": summary, "status": "completed"}
    ]
    stream = stream_of(replies, response(options))
    kinds = [each["type"].removeprefix("response.") for each in events_of(stream)]
    kinds = [each for each in kinds if each.startswith("reasoning")]
    assert kinds == [
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ]
    assert read_with_sdk(stream)["output"][0]["summary"] == summary


async def test_requested_reasoning_has_an_item_even_if_there_is_none() -> None:
    options = ResponsesOptions(wants_reasoning=True)
    for name in ("text", "nothing"):
        with case(name):
            whole = await whole_of(KINDS[name][0], response(options))
            assert [each["type"] for each in whole["output"]][:1] == ["reasoning"]
            events = events_of(stream_of(KINDS[name][0], response(options)))
            assert events[-1]["response"] == whole
            done = [each for each in events if each["type"] == "response.output_item.done"]
            assert [each["item"] for each in done] == whole["output"]
            assert [each["output_index"] for each in done] == [*range(len(done))]


@all_cases("begun", [[], [said("a")], called(0, '{"x"'), thought("a")])
def test_failure_is_the_last_event(begun: list[Reply]) -> None:
    for has_ids in (False, True):
        renderer = event_renderer(response(), has_ids=has_ids)
        stream = renderer.render([*begun, failed(FailureCode.WORKER_LOST)])
        assert renderer.failure is not None
        stream += renderer.render_failure(renderer.failure)
        events = events_of(stream)
        assert [each["sequence_number"] for each in events] == [*range(len(events))]
        assert events[0]["type"] == "response.created"
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"


@all_cases(
    ("error", "code", "is_shown"),
    [
        (OverloadedError("Full.", retry_after_seconds=5), "server_is_overloaded", True),
        (TenantQueueFullError("Full.", retry_after_seconds=1.23), "rate_limit_exceeded", True),
        (StorageFullError("Full."), "rate_limit_exceeded", True),
        (TokensExhaustedError("9 a minute.", retry_after_seconds=1.3), "rate_limit_exceeded", True),
        (TokensExhaustedError("Never.", retry_after_seconds=None), "invalid_prompt", True),
        (OutOfQuotaError("Spent."), "insufficient_quota", True),
        (NoWorkerError("None."), "server_error", False),
        (BadRequestError("Bad."), "invalid_prompt", False),
        (AuthenticationError("Who?"), "server_error", False),
    ],
)
def test_refusals_have_the_codes_of_agents(error: ApiError, code: str, *, is_shown: bool) -> None:
    failure = failure_of(error)
    assert failure["code"] == code
    is_limit = code == "rate_limit_exceeded" and error.retry_after_seconds is not None
    assert failure["message"] == error.message + " Please try again in 1.3s." * is_limit
    stream = failed_stream(error, "resp_1", "m")
    assert (stream is not None) is is_shown
    if stream is not None:
        assert [each["type"] for each in events_of(stream)] == [
            "response.created",
            "response.failed",
        ]
