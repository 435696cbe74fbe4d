"""The stored head of a request, with which any gateway can render its response."""

from dataclasses import replace
from typing import Any

import msgspec

from contract.messages import GenerationJob
from contract.prompts import packed
from contract.sampling import SamplingSpec
from gateway.completions.rendering.completion import Completion, Usage
from gateway.completions.sealing import Sealer
from gateway.completions.stored.head import ResponseHead, decode_head, encode_head
from gateway.dialects.completions import CompletionRequest, to_generation_request
from gateway.dialects.profile import PROFILES, Dialect
from gateway.dialects.request import (
    ChatRequest,
    GenerationRequest,
    ImageSource,
    Tool,
    ToolMode,
    ToolUse,
)
from gateway.dialects.wire import validate
from gateway.records.limits import Limits, LimitScope, SubjectLimits
from gateway.records.usage_record import Counts, UsageRecord
from tests.support.cases import all_cases

SUBJECTS = (SubjectLimits(LimitScope.TENANT, "acme", Limits(budget_micros=5)),)


def request_of(profile: Dialect, **parameters: Any) -> GenerationRequest:
    body = {"model": "m", "prompt": ["a", "b"], **parameters}
    return to_generation_request(
        validate(CompletionRequest, body), PROFILES[profile], max_prompts=10
    )


def completion_of(request: GenerationRequest) -> Completion:
    return Completion(
        id="cmpl-1",
        model="m",
        created=17,
        fingerprint="fp_1",
        request=request,
        prompt_token_ids=[packed([1, 2]), packed([3])],
        prompt_texts=["a", "b"],
        cost_of=lambda _: 0,
    )


def head_of(completion: Completion) -> ResponseHead:
    jobs = [
        GenerationJob(
            id=f"cmpl-1-{index}",
            handle=index,
            gateway="gw",
            tenant="acme",
            cache_salt="salt",
            prompt_token_ids=packed(token_ids),
            max_tokens=4,
            sampling=SamplingSpec(seed=1),
            deadline_ms=99,
            images=[b"\x00\xff"],
        )
        for index, token_ids in enumerate(completion.prompt_token_ids)
    ]
    record = UsageRecord(
        request_id="cmpl-1",
        tenant_id="acme",
        project_id=None,
        credential_id="k",
        model="m",
        endpoint="completions",
        dialect="vllm",
        completion_price=2_000_000,
    )
    return ResponseHead.of(
        completion,
        # A line of a batch shows another id than the one that Redis knows.
        request_id="cmpl-run",
        jobs=jobs,
        record=record,
        subjects=SUBJECTS,
        most=Counts(prompt_tokens=9, completion_tokens=16),
        weight=2.0,
        is_background=True,
        retention_ms=5000,
    )


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@all_cases(
    "parameters",
    [
        {},
        {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "logprobs": 3},
        {"echo": True, "stop": ["\n"], "seed": 5, "logit_bias": {"7": -1.5}},
        {"suffix": "end", "return_token_ids": True, "service_tier": "flex"},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"response_format": {"type": "json_object"}},
    ],
    ids=["plain", "stream", "echo", "suffix", "tools", "structure"],
)
def test_head_describes_the_response_like_its_request(parameters: dict[str, Any]) -> None:
    for dialect in Dialect:
        request = request_of(dialect, **parameters)
        completion = completion_of(request)

        again = decode_head(encode_head(head_of(completion))).completion(Sealer(["secret"]))

        kept = msgspec.structs.replace(
            request,
            prompts=["", ""],
            images=[[], []],
            image_params=[],
            structure=None,
            tool_use=request.tool_use and replace(request.tool_use, tools=[]),
            bias_texts={},
        )
        assert again.request == kept
        expected = msgspec.structs.replace(completion, request=kept, cost_of=None, started_at=0)
        assert msgspec.structs.replace(again, cost_of=None, started_at=0) == expected


def test_head_of_a_chat_stores_the_response_format_and_no_messages() -> None:
    said = {"role": "user", "content": "secret"}
    chat = ChatRequest(
        messages=[said],
        tools=TOOLS,
        image_sources=[
            ImageSource(file=b"secret", param="messages[1]"),
            ImageSource(url="https://secret", param="messages[0]"),
        ],
        template_arguments={"secret": True},
        continues_last_message=True,
        shows_reasoning=False,
        uses_legacy_functions=True,
    )
    tools = [Tool("f", {"secret": True}, is_strict=False)]
    use = ToolUse(tools, ToolMode.NAMED, "f", is_parallel=False)
    request = msgspec.structs.replace(request_of(Dialect.OMLX), chat=chat, tool_use=use)

    encoded = encode_head(head_of(completion_of(request)))

    assert b"secret" not in encoded
    again = decode_head(encoded).completion(Sealer(["secret"]))
    assert again.request.chat == ChatRequest(
        messages=[], shows_reasoning=False, uses_legacy_functions=True
    )
    assert again.request.tool_use == replace(use, tools=[])
    assert again.head()["object"] == "chat.completion"
    assert again.head(is_chunk=True)["object"] == "chat.completion.chunk"


def test_head_stores_jobs_limits_and_prices() -> None:
    head = head_of(completion_of(request_of(Dialect.VLLM)))

    again = decode_head(encode_head(head))

    assert again.jobs == head.jobs
    assert again.subjects == SUBJECTS
    assert (again.weight, again.is_background, again.retention_ms) == (2.0, True, 5000)
    cost_of = again.completion(Sealer(["secret"])).cost_of
    assert cost_of is not None
    assert cost_of(Usage(completion_tokens=3)) == 6


def test_head_of_an_older_gateway_gets_defaults() -> None:
    head = head_of(completion_of(request_of(Dialect.LLAMACPP, t_max_predict_ms=5)))
    assert "suffix" not in head.request
    del head.request["max_predict_ms"]

    assert decode_head(encode_head(head)).generation_request().max_predict_ms == 0
