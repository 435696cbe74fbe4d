"""Parameters that are not served: refused where they would change the response, named where not."""

import itertools
import json
import re
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.embeddings import (
    ClassificationRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    read_classification,
    read_embedding,
    read_rerank,
    read_score,
)
from gateway.dialects.messages.request import MessageRequest
from gateway.dialects.parameters import (
    PARAMETERS,
    REJECTED,
    REJECTED_BY_CHATS,
    REJECTED_BY_POOLING,
    ROWS,
    Endpoints,
)
from gateway.dialects.profile import Profile
from gateway.dialects.responses.request import ResponseRequest
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.chat_reading import chat_refusal
from tests.gateway.dialects.reading import EVERY_PROFILE, VLLM, read, refusal, unsupported
from tests.support.cases import all_cases


@all_cases("name", sorted(REJECTED))
def test_parameter_that_would_change_the_response_is_refused(name: str) -> None:
    accepted = [json.dumps(each) for each in REJECTED[name].accepted]
    for value in ("something", 2, True, [1], {"a": 1}):
        if json.dumps(value) in accepted:
            continue
        error = refusal(**{name: value})
        assert error.message == unsupported(name, value, REJECTED[name])
        assert (error.param, error.code) == (name, "unsupported_parameter")


NEUTRAL: list[tuple[str, Any]] = [
    *itertools.product(sorted(REJECTED), ([], {}, "", None)),
    *((name, any(each is True for each in REJECTED[name].accepted)) for name in sorted(REJECTED)),
    ("adaptive_target", -1),
    ("adaptive_target", -1.0),
    ("function_call", "none"),
    ("function_call", "auto"),
    ("length_penalty", 1.0),
    ("modalities", ["text"]),
    ("priority", 0),
    ("priority", 0.0),
]


def test_parameter_at_its_neutral_value_is_neither_refused_nor_named() -> None:
    for name, value in NEUTRAL:
        assert read(**{name: value}).ignored_parameters == (), (name, value)


@all_cases("profile", EVERY_PROFILE)
def test_value_near_the_neutral_one_is_refused(profile: Profile) -> None:
    for name, value in (
        ("priority", 1),
        ("priority", -1),
        ("adaptive_target", 0.5),
        ("lora", [{"id": 0, "scale": 0.5}]),
        ("function_call", {"name": "f"}),
        ("use_beam_search", True),
    ):
        error = refusal(profile, **{name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter"), value


@all_cases("profile", EVERY_PROFILE)
def test_parameter_without_effect_is_named(profile: Profile) -> None:
    plain = read(profile, seed=1)
    for name, value in (
        ("adaptive_decay", 0.9),
        ("backend_sampling", True),
        ("id_slot", 0),
        ("metadata", {"a": "b"}),
        ("n_cache_reuse", 5),
        ("n_discard", 5),
        ("n_keep", 5),
        ("prompt_cache_key", "a"),
        ("return_progress", True),
        ("safety_identifier", "a"),
        ("session_id", "a"),
        ("verbose", True),
    ):
        request = read(profile, seed=1, **{name: value})
        assert request.ignored_parameters == (name,)
        assert request.sampling == plain.sampling, name


def test_entries_of_objects_are_named_by_their_paths() -> None:
    request = read(
        stream=True,
        stream_options={"include_usage": True, "pace": 5, "absent": None},
        repetition_detection={"max_pattern_size": 0, "colour": 1},
        zeta=1,
    )
    assert request.ignored_parameters == (
        "repetition_detection.colour",
        "stream_options.pace",
        "zeta",
    )


def test_refusal_has_its_reason() -> None:
    assert refusal(prediction={"type": "content", "content": "a"}).message == (
        "'prediction' is not supported. It cannot speed up the response here. Without it, the "
        "response is the same."
    )
    assert refusal(length_penalty=2).message == (
        "'length_penalty' must be 1; other values are not supported. Given: 2. It belongs to beam "
        "search, which is not available."
    )


OF_OTHER_APIS: dict[str, tuple[Any, str]] = {
    "plugins": ([{"id": "web"}], "'tools'"),
    "prompt_truncate_len": (5, "'truncate_prompt_tokens'"),
    "raw_output": (True, "'return_token_ids'"),
    "response_fields": (["content"], "POST /completion"),
    "stop_regex": ("a|b", "'stop'"),
}
"""Documented parameters that change the response, a value, and what the error names instead."""


def test_parameters_of_other_apis_are_refused_with_what_to_use_instead() -> None:
    of_chats = OF_OTHER_APIS | {"separate_reasoning": (False, "'include_reasoning'")}
    for refuse, rows in ((refusal, OF_OTHER_APIS), (chat_refusal, of_chats)):
        for name, (value, instead) in rows.items():
            error = refuse(**{name: value})
            assert (error.param, error.code) == (name, "unsupported_parameter")
            assert instead in error.message


_OF_TEXTS = "input messages use_activation add_special_tokens add_generation_prompt"
_OF_CHATS = "continue_final_message chat_template_kwargs; chat_template media_io_kwargs"
_OF_PAIRS = "documents use_activation max_tokens_per_query max_tokens_per_doc instruction"
POOLING: dict[str, tuple[Any, type[BaseModel], dict[str, Any], str]] = {
    "embeddings": (
        read_embedding,
        EmbeddingRequest,
        {"input": "a"},
        f"{_OF_TEXTS} encoding_format dimensions {_OF_CHATS} embed_dtype endianness",
    ),
    "classify": (
        read_classification,
        ClassificationRequest,
        {"input": "a"},
        f"{_OF_TEXTS} {_OF_CHATS}",
    ),
    "score": (
        read_score,
        ScoreRequest,
        {"text_1": "a", "text_2": "b"},
        f"text_1 text_2 queries items data_1 data_2 {_OF_PAIRS} chat_template_kwargs;",
    ),
    "rerank": (
        read_rerank,
        RerankRequest,
        {"query": "a", "documents": ["b"]},
        f"query top_n {_OF_PAIRS} chat_template_kwargs;",
    ),
}
"""Each endpoint of pooling models, with a body, and with vLLM's parameters that are served, and
after the semicolon, those that are refused. Others have no effect: `request_id`, `cache_salt`."""
OF_EVERY_POOLING_ENDPOINT = ("model", "user", "truncate_prompt_tokens", "truncation_side")


@all_cases("name", POOLING)
def test_each_pooling_parameter_of_vllm_is_classified(name: str) -> None:
    read_body, fields, body, listed = POOLING[name]
    served, refused = (each.split() for each in listed.split(";"))
    assert {*served, *OF_EVERY_POOLING_ENDPOINT} <= fields.model_fields.keys()
    every = {*refused, "padding", "priority", "mm_processor_kwargs", "normalize", "task"}
    assert every <= REJECTED_BY_POOLING.keys()
    read_pooling = partial(read_body, profile=VLLM, max_prompts=1)
    for param, row in REJECTED_BY_POOLING.items():
        with pytest.raises(BadRequestError) as caught:
            read_pooling(body | {param: "something"})
        assert caught.value.message == unsupported(param, "something", row)
        assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
        for accepted in (None, *row.accepted):
            assert read_pooling(body | {param: accepted}).ignored_parameters == (), param
    unread = read_pooling(body | {"request_id": "a", "cache_salt": "b"}).ignored_parameters
    assert unread == ("cache_salt", "request_id")


def test_parameters_of_messages_have_no_effect_on_texts() -> None:
    given = {"add_generation_prompt": True, "chat_template_kwargs": {"a": 1}}
    read = read_embedding({"model": "m", "input": "a"} | given, VLLM, max_prompts=1)
    assert read.ignored_parameters == tuple(given)


def test_nothing_is_both_served_and_refused() -> None:
    for _, fields, *_ in POOLING.values():
        assert not REJECTED_BY_POOLING.keys() & fields.model_fields.keys()
    assert not REJECTED.keys() & CompletionRequest.model_fields.keys()
    assert not REJECTED_BY_CHATS.keys() & ChatCompletionRequest.model_fields.keys()


def test_parameters_of_one_endpoint_are_classified_at_the_other() -> None:
    completions, chats = CompletionRequest.model_fields, ChatCompletionRequest.model_fields
    labels = {name for name, row in PARAMETERS.items() if not row.endpoints}
    assert chats.keys() - completions.keys() - labels <= REJECTED.keys()
    assert completions.keys() - chats.keys() <= REJECTED_BY_CHATS.keys()


def test_reasons_point_to_what_is_served() -> None:
    bodies = {
        Endpoints.COMPLETIONS: CompletionRequest.model_fields,
        Endpoints.CHATS: ChatCompletionRequest.model_fields,
        Endpoints.RESPONSES: ResponseRequest.model_fields,
        Endpoints.MESSAGES: MessageRequest.model_fields,
        Endpoints.POOLING: {
            name for _, fields, *_ in POOLING.values() for name in fields.model_fields
        },
    }
    for name, row in ROWS:
        served = {each for endpoint in row.endpoints for each in bodies[endpoint]}
        named = set(re.findall(r"'(\w+)[\w.]*'", row.reason))
        assert named - {"strict", "text", "partial"} <= served, name
