"""Verbatim examples from the documents of the served APIs, each in its dialect."""

from typing import Any

from contract.sampling import Mirostat
from gateway.dialects.profile import Profile
from gateway.dialects.request import Structure, StructureKind
from tests.e2e.seeds.calling import example
from tests.gateway.dialects.reading import (
    FIREWORKS,
    LLAMACPP,
    MISTRALRS,
    OMLX,
    read,
    read_body,
)
from tests.support.cases import all_cases

EXAMPLES = [
    (LLAMACPP, "llamacpp_request"),
    (LLAMACPP, "llamacpp_logprobs"),
    (LLAMACPP, "llamacpp_batch"),
    (LLAMACPP, "llamacpp_infill"),
    (LLAMACPP, "llamacpp_grammar"),
    (LLAMACPP, "llamacpp_json_schema"),
    (LLAMACPP, "llamacpp_mirostat"),
    (MISTRALRS, "mistralrs_request"),
    (OMLX, "omlx_request"),
]


@all_cases(("profile", "name"), EXAMPLES)
def test_example_is_served_and_no_parameter_is_ignored(profile: Profile, name: str) -> None:
    body = example(name)
    request = read_body(body, profile)
    assert request.ignored_parameters == ()
    assert request.model == body["model"]
    assert request.max_tokens == body["max_tokens"]
    assert request.sampling.temperature == body.get("temperature", profile.temperature)
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    assert request.prompts == prompts
    assert request.logprobs == body.get("logprobs")
    assert request.suffix == (body.get("suffix") or "")


def test_constraints_of_the_llamacpp_examples_are_read() -> None:
    grammar = read_body(example("llamacpp_grammar"), LLAMACPP).structure
    assert grammar is not None
    assert grammar.kind is StructureKind.GBNF
    assert grammar.source.startswith("root ::= expr\nexpr ::= term (('+'")
    schema = read_body(example("llamacpp_json_schema"), LLAMACPP).structure
    assert schema is not None
    assert schema.source["required"] == ["name", "price"]
    chain = read_body(example("llamacpp_mirostat"), LLAMACPP).sampling.chain
    assert chain is not None
    assert chain.mirostat == Mirostat(2, 5.0, 0.1)


def test_example_of_mistralrs_is_read() -> None:
    request = read_body(example("mistralrs_request"), MISTRALRS)
    assert request.structure == Structure(StructureKind.REGEX, "example", "grammar")
    assert (request.stop, request.stream) == (["example"], True)
    assert (request.n, request.best_of, request.tool_use) == (1, 1, None)


@all_cases(
    ("prompt", "expected"),
    [
        ("Once upon a time", ["Once upon a time"]),
        ([12, 34, 56], [[12, 34, 56]]),
        (["prompt1", "prompt2"], ["prompt1", "prompt2"]),
        ([12, 34, "string", 56], [[12, 34, "string", 56]]),
    ],
)
def test_prompts_of_the_llamacpp_document_are_read(prompt: Any, expected: list[Any]) -> None:
    assert read(LLAMACPP, prompt=prompt).prompts == expected


def test_response_formats_of_the_fireworks_document_are_read() -> None:
    plain = read(FIREWORKS, response_format={"type": "json_object"}).structure
    assert plain == Structure(StructureKind.JSON_OBJECT, None, "response_format")
    schema = {"type": "object", "properties": {}}
    given = {"type": "json_object", "schema": schema}
    structure = read(FIREWORKS, response_format=given).structure
    assert structure == Structure(
        StructureKind.JSON_SCHEMA, schema, "response_format", is_strict=False
    )


FIREWORKS_DOCUMENTED: dict[str, list[Any]] = {
    "context_length_exceeded_behavior": ["truncate", "error"],
    "echo": [False, True],
    "frequency_penalty": [0, -2, 2],
    "ignore_eos": [False, True],
    "logprobs": [0, 5],
    "max_tokens": [16],
    "mirostat_lr": [0.1],
    "mirostat_target": [1.5],
    "n": [1, 128],
    "presence_penalty": [0, -2, 2],
    "repetition_penalty": [1, 1.2, 2],
    "response_format": [{"type": "json_object"}],
    "stop": ["a", ["a", "b", "c", "d"]],
    "stream": [False, True],
    "temperature": [0, 1, 2],
    "top_k": [1, 128],
    "top_p": [0, 1],
    "user": ["someone"],
}


def test_every_documented_parameter_of_fireworks_is_served() -> None:
    for name, values in FIREWORKS_DOCUMENTED.items():
        for value in (*values, None):
            assert read(FIREWORKS, **{name: value}).ignored_parameters == (), (name, value)


OMLX_DOCUMENTED: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 50,
    "temperature": 0.7,
    "top_p": 0.9,
    "min_p": 0.1,
    "stop": ["a"],
    "seed": 5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.1,
}


def test_every_documented_parameter_of_omlx_is_served() -> None:
    request = read(OMLX, **OMLX_DOCUMENTED)
    assert request.ignored_parameters == ()
    assert request.sampling.chain is not None
    assert request.sampling.chain.xtc is not None


OMLX_STRUCTURED = [
    {"json": {"type": "object"}},
    {"regex": "[0-9]+"},
    {"choice": ["yes", "no"]},
    {"grammar": "root ::= [0-9]+"},
]


@all_cases("given", OMLX_STRUCTURED)
def test_structured_outputs_of_the_omlx_document_are_served(given: dict[str, Any]) -> None:
    assert read(OMLX, structured_outputs=given).structure is not None
