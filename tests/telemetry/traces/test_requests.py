"""One request is one trace, across gateway, queue and worker."""

import json
from typing import Any

import httpx
import pytest

from tests.support.cases import all_cases
from tests.support.processes import wait_until
from tests.support.secrets import scan_for_secrets
from tests.support.stack import MODEL, Stack
from tests.telemetry.traces.client import PROMPT, ask, client_trace
from tests.telemetry.traces.collector import Collector, Span
from tests.telemetry.traces.conftest import STEP_SECONDS
from tests.telemetry.traces.spans import REQUEST, WHOLE, by_name, check_order, check_parents


def test_streamed_request_has_all_spans_with_the_right_parents(
    stack: Stack, collector: Collector
) -> None:
    reply = ask(stack, stream=True, stream_options={"include_usage": True})
    trace = by_name(collector.wait_for(reply.trace_id, *WHOLE))
    check_parents(trace, reply)
    kinds = {REQUEST: "SERVER", "attempt": "PRODUCER", "generate": "CONSUMER"}
    assert {name: span.kind for name, span in trace.items()} == {
        **dict.fromkeys(trace, "INTERNAL"),
        **kinds,
    }
    assert not any(span.is_error or span.events or span.links for span in trace.values())


def test_spans_follow_the_stages_of_the_request(stack: Stack, collector: Collector) -> None:
    reply = ask(stack, stream=True)
    trace = by_name(collector.wait_for(reply.trace_id, *WHOLE))
    check_order(trace)
    # Each step of the engine is a token.
    assert trace["decode"].end - trace["decode"].start > 19 * 0.75 * STEP_SECONDS * 1e9


def test_spans_carry_the_attributes_of_the_conventions(stack: Stack, collector: Collector) -> None:
    reply = ask(
        stack,
        stream=True,
        stream_options={"include_usage": True},
        headers={"x-request-id": "req_from_the_client"},
    )
    trace = by_name(collector.wait_for(reply.trace_id, *WHOLE))
    last = reply.chunks[-1]
    usage, completion_id = last["usage"], last["id"]
    counts = {
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
    }
    about = {"sluice.tenant.id": "acme", "sluice.request.id": "req_from_the_client"}
    expected = counts | about
    request = trace[REQUEST].attributes
    assert usage["completion_tokens"] == 20
    assert request.items() >= expected.items()
    assert (
        request.items()
        >= {
            "http.request.method": "POST",
            "http.route": "/v1/completions",
            "http.response.status_code": 200,
            "server.address": "127.0.0.1",
            "server.port": int(stack.url.rpartition(":")[2]),
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "sluice",
            "gen_ai.request.model": MODEL,
            "gen_ai.request.max_tokens": 20,
            "gen_ai.request.stream": True,
            "gen_ai.response.id": completion_id,
        }.items()
    )
    assert 0 < request["gen_ai.response.time_to_first_chunk"] < 20
    generate = trace["generate"].attributes
    job = {"sluice.job.id": f"{completion_id}-0", "sluice.attempt": 1, **about}
    assert generate.items() >= (counts | job).items()
    assert generate["gen_ai.response.finish_reasons"] == ["length"]
    assert generate["sluice.outcome"] == "finished"
    assert trace["attempt"].attributes.items() >= {**job, "sluice.outcome": "finished"}.items()
    settled = {"gen_ai.response.id": completion_id, "sluice.outcome": "finished"}
    assert trace["settle"].attributes.items() >= settled.items()


def test_whole_chat_of_several_choices_is_traced(stack: Stack, collector: Collector) -> None:
    reply = ask(
        stack,
        path="/v1/chat/completions",
        prompt=None,
        messages=[{"role": "user", "content": PROMPT}],
        n=2,
    )
    assert reply.response.status_code == 200
    names = ["POST /v1/chat/completions", *WHOLE[1:]]
    trace = by_name(collector.wait_for(reply.trace_id, *names))
    attributes = trace["POST /v1/chat/completions"].attributes
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.choice.count"] == 2
    assert len(trace["generate"].attributes["gen_ai.response.finish_reasons"]) == 2


def test_session_of_an_agent_is_traced(stack: Stack, collector: Collector) -> None:
    asked: dict[str, Any] = {
        "path": "/v1/messages",
        "prompt": None,
        "messages": [{"role": "user", "content": PROMPT}],
        "metadata": {"user_id": "by-user"},
    }
    headers = {
        "x-claude-code-session-id": "by-header",
        "x-claude-code-agent-id": "agent",
        "x-claude-code-parent-agent-id": "parent",
    }
    for given, session in ((headers, "by-header"), ({}, "by-user")):
        reply = ask(stack, **asked, headers=given)
        assert reply.response.status_code == 200
        trace = by_name(collector.wait_for(reply.trace_id, "POST /v1/messages", *WHOLE[1:]))
        attributes = trace["POST /v1/messages"].attributes
        assert attributes["gen_ai.conversation.id"] == session
        assert attributes.get("gen_ai.agent.id") == given.get("x-claude-code-agent-id")
        parent = given.get("x-claude-code-parent-agent-id")
        assert attributes.get("sluice.agent.parent_id") == parent


def test_each_prompt_of_a_request_has_an_attempt(stack: Stack, collector: Collector) -> None:
    reply = ask(stack, prompt=[PROMPT, PROMPT, PROMPT])
    names = [*WHOLE, "attempt", "attempt", "generate", "generate", "decode", "decode"]
    trace = collector.wait_for(reply.trace_id, *names)
    attempts = {span.span_id: span for span in trace if span.name == "attempt"}
    assert len(attempts) == 3
    assert {span.parent_id for span in trace if span.name == "generate"} == set(attempts)


def test_request_without_a_client_trace_begins_one(stack: Stack, collector: Collector) -> None:
    response = httpx.post(
        f"{stack.url}/v1/completions",
        headers={"authorization": f"Bearer {stack.key()}", "x-request-id": "req_alone"},
        json={"model": MODEL, "prompt": PROMPT, "max_tokens": 2},
        timeout=60,
    )
    assert response.status_code == 200
    reply = ask(stack)
    collector.wait_for(reply.trace_id, *WHOLE)

    def alone() -> list[Span]:
        servers = (span for span in collector.spans if span.kind == "SERVER")
        return [span for span in servers if span.attributes["sluice.request.id"] == "req_alone"]

    wait_until(lambda: bool(alone()), what="the export")
    [first] = alone()
    assert first.parent_id == ""
    collector.wait_for(first.trace_id, *WHOLE)


@all_cases(
    "traceparent",
    ["", "nonsense", f"00-{'0' * 32}-{'1' * 16}-01", f"ff-{'1' * 32}-{'1' * 16}-01", "0" * 500],
    ids=["empty", "nonsense", "no trace", "unknown version", "long"],
)
def test_malformed_traceparent_is_ignored(stack: Stack, traceparent: str) -> None:
    response = httpx.get(
        f"{stack.url}/v1/models",
        headers={"authorization": f"Bearer {stack.key()}", "traceparent": traceparent},
    )
    assert response.status_code == 200


def test_unsampled_trace_of_the_client_is_not_exported(stack: Stack, collector: Collector) -> None:
    unsampled = ask(stack, sampled=False, stream=True)
    assert unsampled.response.status_code == 200
    sampled = ask(stack)
    collector.wait_for(sampled.trace_id, *WHOLE)
    assert collector.trace(unsampled.trace_id) == []


def test_refusals_are_named_by_their_codes(stack: Stack, collector: Collector) -> None:
    for reply, name, code in (
        (ask(stack, key="sk-nobody"), "authenticate", "invalid_api_key"),
        (ask(stack, max_tokens=10_000_000), "plan", "context_length_exceeded"),
    ):
        assert 400 <= reply.response.status_code < 500
        trace = by_name(collector.wait_for(reply.trace_id, REQUEST))
        assert trace[name].attributes["error.type"] == code
        request = trace[REQUEST]
        assert request.attributes["error.type"] == code
        assert request.attributes["http.response.status_code"] == reply.response.status_code
        assert not request.is_error
        assert "attempt" not in trace


def test_management_routes_are_named_by_their_templates(stack: Stack, collector: Collector) -> None:
    trace_id, span_id, header = client_trace()
    httpx.get(
        f"{stack.url}/v1/models/{MODEL}",
        headers={"authorization": f"Bearer {stack.key()}", **header},
    )
    [request] = collector.wait_for(trace_id, "GET /v1/models/{model_id:path}")[:1]
    assert request.parent_id == span_id
    assert request.attributes["http.route"] == "/v1/models/{model_id:path}"


def test_probes_are_not_traced(stack: Stack, collector: Collector) -> None:
    paths = ("/healthz", "/readyz", "/health", "/ping", "/version", "/metrics")
    for path in paths:
        httpx.get(f"{stack.listener_of(path)}{path}")
    collector.wait_for(ask(stack).trace_id, *WHOLE)
    names = {span.name for span in collector.spans}
    assert not {"GET", *(f"GET {path}" for path in paths)} & names


def test_neither_content_nor_keys_are_exported_or_logged(
    stack: Stack, collector: Collector
) -> None:
    key = stack.key()
    bearer = {"authorization": f"Bearer {key}"}
    reply = ask(stack, stream=True)
    chat = ask(
        stack,
        path="/v1/chat/completions",
        prompt=None,
        messages=[{"role": "user", "content": PROMPT}],
    )
    # Keys in the wrong places, and content in refused requests.
    httpx.get(f"{stack.url}/v1/keys/{key}", headers=bearer)
    httpx.get(f"{stack.url}/{key}?key={key}", headers=bearer)
    ask(stack, key=f"{key[:-1]}-")
    httpx.get(f"{stack.url}/v1/models", headers={"x-api-key": key, "x-api-dialect": "llamacpp"})
    ask(stack, nonsense=PROMPT, temperature=PROMPT)
    httpx.post(f"{stack.url}/v1/completions", headers=bearer, content=f'{{"prompt": "{PROMPT}')
    last = ask(stack)
    for each in (reply, last):
        collector.wait_for(each.trace_id, *WHOLE)
    collector.wait_for(chat.trace_id, "POST /v1/chat/completions", "decode")
    whole = "".join(chunk["choices"][0]["text"] for chunk in reply.chunks)
    # More than a few letters, which a log may contain by chance.
    text = " ".join(whole.split()[:4])
    logs = {name: stack.log(name) for name in ("gateway", "worker")}
    # Protobuf stores texts unchanged.
    sources = {"exported": b"".join(collector.bodies).decode(errors="replace"), **logs}
    assert scan_for_secrets(sources, [key]) == []
    for reported in sources.values():
        assert "walrus" not in reported
        assert text not in reported


@pytest.mark.slow
def test_content_is_exported_if_enabled(stack: Stack, collector: Collector) -> None:
    url = stack.start_gateway(
        "telling gateway", **collector.environment, SLUICE_TRACE_CONTENT="true"
    )
    try:
        reply = ask(stack, url=url)
        [request] = [
            span for span in collector.wait_for(reply.trace_id, *WHOLE) if span.name == REQUEST
        ]
        reported = json.loads(request.attributes["gen_ai.input.messages"])
        assert reported == [{"role": "user", "parts": [{"type": "text", "content": PROMPT}]}]
        assert scan_for_secrets({"exported": b"".join(collector.bodies)}, [stack.key()]) == []
    finally:
        stack.gateways.remove(url)
        stack.stop("telling gateway")
