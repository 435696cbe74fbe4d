"""Every parameter in the documents of chat APIs is accepted with its documented types."""

from typing import Any, get_args, get_type_hints

from openai.types.chat import completion_create_params
from openai.types.shared_params import reasoning_effort

from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.chat.thinking import EFFORTS
from gateway.dialects.parameters import PARAMETERS, REJECTED_BY_CHATS
from tests.gateway.dialects.chat_reading import read_chat_body
from tests.gateway.dialects.reading import OMLX, OPENAI
from tests.support.cases import all_cases

FRANCE = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "my_func",
        "description": "Does it.",
        "parameters": {"type": "object", "properties": {}},
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}

OF_OMLX: list[dict[str, Any]] = [
    {},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
    {"max_tokens": 32_768, "seed": 42},
    {"stop": "END"},
    {"stop": ["END", "STOP"]},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "my_func"}}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"grammar": 'root ::= "a"'}},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"chat_template_kwargs": {"reasoning_effort": "low"}},
    {"thinking_budget": 512},
    {"thinking_budget": None},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5},
    {"xtc_probability": 0.5, "xtc_threshold": 0.1},
]


@all_cases("parameters", OF_OMLX)
def test_parameters_of_omlx_are_accepted(parameters: dict[str, Any]) -> None:
    request = read_chat_body({"model": "your-model", "messages": FRANCE} | parameters, OMLX)
    assert request.chat
    assert request.chat.messages == FRANCE
    assert request.ignored_parameters == ()


@all_cases("detail", ["auto", "low", "high"])
def test_image_of_omlx_is_accepted(detail: str) -> None:
    url = {"url": "data:image/jpeg;base64,/9j/4AAQSk==", "detail": detail}
    content = [
        {"type": "text", "text": "What is in this image?"},
        {"type": "image_url", "image_url": url},
    ]
    body = {"model": "your-model", "messages": [{"role": "user", "content": content}]}
    request = read_chat_body(body, OMLX)
    assert request.chat
    assert len(request.chat.image_sources) == 1


def test_every_parameter_of_openai_is_known() -> None:
    documented = get_type_hints(completion_create_params.CompletionCreateParamsBase)
    known = {*ChatCompletionRequest.model_fields, *REJECTED_BY_CHATS}
    # Hints to OpenAI's cache, which have no effect and are named as such.
    assert set(documented) - known == {"prompt_cache_options", "prompt_cache_retention"}
    assert set(documented) <= {*known, *PARAMETERS}


def test_every_effort_of_openai_is_known() -> None:
    [efforts, _] = get_args(reasoning_effort.ReasoningEffort)
    assert set(get_args(efforts)) == set(EFFORTS)


def test_body_of_openais_client_is_accepted() -> None:
    body = {
        "model": "m",
        "messages": FRANCE,
        "frequency_penalty": 0,
        "logit_bias": {"5": 1},
        "logprobs": True,
        "top_logprobs": 2,
        "max_completion_tokens": 5,
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "n": 2,
        "parallel_tool_calls": True,
        "presence_penalty": 0,
        "prompt_cache_key": "a",
        "reasoning_effort": "minimal",
        "response_format": {"type": "text"},
        "safety_identifier": "a",
        "seed": 5,
        "service_tier": "auto",
        "stop": None,
        "store": False,
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "temperature": 1,
        "tool_choice": "auto",
        "tools": [TOOL],
        "top_p": 1,
        "user": "u",
        "verbosity": "medium",
    }
    assert read_chat_body(body, OPENAI).ignored_parameters == ()
