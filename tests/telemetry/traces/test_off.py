"""Tracing off: no spans are made, sent or propagated; and messages without trace fields."""

import msgspec

from common.tracing import context_of, link_to, traceparent_of
from contract.messages import GenerationJob, decode_job, encode
from contract.prompts import encode_ids, packed
from contract.sampling import SamplingSpec
from gateway.platform import tracing
from gateway.platform.settings import Settings
from tests.support.cases import all_cases
from tests.support.stack import running_stack
from tests.telemetry.traces.client import ask, start_scripted_worker
from tests.telemetry.traces.collector import Collector

NEW_FIELDS = (
    *("request_id", "traceparent", "earlier_traceparent", "affinity", "pooling", "chunks"),
    *("model_share", "audio"),
)
PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def job(**changes: object) -> GenerationJob:
    known = GenerationJob(
        id="cmpl-a-0",
        handle=1,
        gateway="gw",
        tenant="acme",
        cache_salt="salt",
        prompt_token_ids=packed([1, 2]),
        max_tokens=3,
        sampling=SamplingSpec(seed=1),
        deadline_ms=4,
    )
    return msgspec.structs.replace(known, **changes)


def test_tracing_functions_do_nothing_while_tracing_is_off() -> None:
    tracing.start(Settings())
    with tracing.request_span("POST", {"traceparent": PARENT}) as span:
        assert tracing.span("plan") is tracing.span("settle")
        tracing.note({"a": 1})
        assert traceparent_of() == ""
        assert tracing.exemplar_of(span) is None
        assert tracing.here() is None
        assert not tracing.attempt_span(PARENT, earlier="", attributes={}).is_recording()
    tracing.stop()


def test_nothing_is_exported_unless_enabled(collector: Collector) -> None:
    with running_stack() as stack:
        untraced = {**collector.environment, "SLUICE_TRACES": "false"}
        stack.start_gateway(**untraced)
        # A worker that would record spans which its gateway does not.
        start_scripted_worker(stack, **collector.environment)
        assert ask(stack).response.status_code == 200
        stack.stop("worker")
        stack.stop("gateway")
    assert collector.bodies == []


def test_job_of_an_older_gateway_can_be_read() -> None:
    fields = msgspec.msgpack.decode(encode(job(request_id="req_a", traceparent=PARENT)))
    old = {name: value for name, value in fields.items() if name not in NEW_FIELDS}
    assert len(old) == len(fields) - 2
    old["prompt_token_ids"] = encode_ids(packed(old["prompt_token_ids"]))
    assert decode_job(msgspec.msgpack.encode(old)) == job()


def test_older_worker_can_read_a_job_with_a_trace() -> None:
    names = [each.name for each in msgspec.structs.fields(GenerationJob)]
    assert tuple(names[-len(NEW_FIELDS) :]) == NEW_FIELDS
    older = msgspec.defstruct("Older", [("id", str), ("prompt_token_ids", list[int])], kw_only=True)
    read = msgspec.msgpack.decode(encode(job(traceparent=PARENT)), type=older)
    assert (read.id, read.prompt_token_ids) == ("cmpl-a-0", [1, 2])  # type: ignore[attr-defined]


@all_cases("text", ["", "nonsense", f"00-{'0' * 32}-{'b' * 16}-01", PARENT[:-1]])
def test_malformed_traceparent_names_no_span(text: str) -> None:
    assert context_of(text) == {}
    assert not link_to(text).context.is_valid


def test_traceparent_round_trips() -> None:
    assert traceparent_of(context_of(PARENT)) == PARENT
    assert f"{link_to(PARENT).context.span_id:016x}" == "b" * 16
