"""Conflicts between the served APIs: what each dialect does, one test for each conflict.

Conflict 3 is in test_completion_dialect.py, 13 with the grammars. 17, 18 and 20 concern responses,
19 concerns chats, and 25 authentication.
"""

import math
from typing import Any

import pytest

from contract.messages import Ranking
from contract.sampling import Mirostat
from gateway.dialects.parameters import reject_ignored
from gateway.dialects.profile import PROFILES, ContextLengthBehavior, Profile
from gateway.dialects.request import Structure, StructureKind
from gateway.records.errors import UnknownParameterError
from tests.gateway.dialects.reading import (
    EVERY_PROFILE,
    FIREWORKS,
    FIREWORKS_2026,
    LLAMACPP,
    LLAMACPP_2026,
    MISTRALRS,
    OMLX,
    OPENAI,
    VLLM,
    read,
    refusal,
)
from tests.support.cases import all_cases

TRUNCATE, ERROR = ContextLengthBehavior.TRUNCATE, ContextLengthBehavior.ERROR


@all_cases("profile", EVERY_PROFILE)
def test_conflict_01_stop_text_in_output(profile: Profile) -> None:
    assert read(profile).includes_stop is (profile is FIREWORKS)
    for wish in (True, False):
        assert read(profile, include_stop_str_in_output=wish).includes_stop is wish


@all_cases(
    ("profile", "expected"),
    [
        (FIREWORKS, TRUNCATE),
        (LLAMACPP, TRUNCATE),
        (OMLX, TRUNCATE),
        (VLLM, TRUNCATE),
        (OPENAI, ERROR),
        (MISTRALRS, ERROR),
    ],
)
def test_conflict_02_prompt_and_max_tokens_beyond_the_window(
    profile: Profile, expected: ContextLengthBehavior
) -> None:
    assert read(profile).context_length_behavior is expected


@all_cases(
    ("profile", "expected"),
    [
        (OPENAI, 16),
        (FIREWORKS, 16),
        (VLLM, 16),
        (LLAMACPP, -1),
        (MISTRALRS, -1),
        (OMLX, 32_768),
    ],
)
def test_conflict_04_max_tokens_default(profile: Profile, expected: int) -> None:
    assert read(profile).max_tokens == expected
    assert read(profile, max_tokens=5).max_tokens == 5


def test_conflict_05_sampler_defaults() -> None:
    for profile, repetition in ((LLAMACPP, 1.1), (LLAMACPP_2026, 1.0)):
        spec = read(profile).sampling
        assert (spec.temperature, spec.top_p, spec.top_k, spec.min_p) == (0.8, 0.95, 40, 0.05)
        assert spec.repetition_penalty == repetition
    for profile in (OPENAI, FIREWORKS, MISTRALRS, OMLX, VLLM):
        spec = read(profile).sampling
        assert (spec.temperature, spec.top_p, spec.top_k, spec.min_p) == (1.0, 1.0, 0, 0.0)
        assert spec.repetition_penalty == 1.0
        assert spec.chain is None


@all_cases("profile", [OPENAI, FIREWORKS, MISTRALRS, OMLX, VLLM])
def test_conflict_06_most_dialects_use_the_engines_penalties(profile: Profile) -> None:
    spec = read(
        profile, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2
    ).sampling
    assert spec.chain is None


def test_conflict_06_penalties_of_llamacpp_look_at_64_tokens_of_prompt_and_completion() -> None:
    chain = read(LLAMACPP, presence_penalty=0.5).sampling.chain
    assert chain is not None
    assert (chain.penalty_last_n, chain.penalizes_prompt) == (64, True)


def test_conflict_06_penalty_window_is_served_in_every_dialect() -> None:
    chain = read(OPENAI, presence_penalty=0.5, repeat_last_n=10).sampling.chain
    assert chain is not None
    assert (chain.penalty_last_n, chain.penalizes_prompt) == (10, False)


@all_cases("profile", EVERY_PROFILE)
def test_conflict_07_repeat_penalty_is_repetition_penalty(profile: Profile) -> None:
    assert read(profile, repeat_penalty=1.3).sampling.repetition_penalty == 1.3
    assert read(profile, repetition_penalty=1.3).sampling.repetition_penalty == 1.3
    error = refusal(profile, repeat_penalty=1.3, repetition_penalty=1.2)
    assert error.message == (
        "'repetition_penalty' and 'repeat_penalty' are the same parameter and must be equal. "
        "Given: 1.2 and 1.3."
    )


@all_cases(
    ("given", "expected"),
    [
        ({"mirostat": 0}, None),
        ({"mirostat": 0, "mirostat_tau": 3.0}, None),
        ({"mirostat_tau": 3.0, "mirostat_eta": 0.2}, None),
        ({"mirostat": 1}, Mirostat(1, 5.0, 0.1)),
        ({"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2}, Mirostat(2, 3.0, 0.2)),
        ({"mirostat_target": 8.0}, Mirostat(2, 3.0, 0.1)),
        ({"mirostat_target": 1.0, "mirostat_lr": 0.0}, Mirostat(2, 0.0, 0.0)),
        ({"mirostat_lr": 0.1}, None),
    ],
)
def test_conflict_08_mirostat_names_and_units(
    given: dict[str, Any], expected: Mirostat | None
) -> None:
    for profile in (OPENAI, FIREWORKS, LLAMACPP, MISTRALRS, OMLX, VLLM):
        chain = read(profile, **given).sampling.chain
        assert (chain.mirostat if chain else None) == expected


def test_conflict_08_target_in_bits() -> None:
    chain = read(FIREWORKS_2026, mirostat_target=1.5).sampling.chain
    assert chain is not None
    assert chain.mirostat == Mirostat(2, 1.5, 0.1)
    assert read(FIREWORKS_2026, mirostat_target=0.5)
    error = refusal(FIREWORKS_2026, mirostat_target=101)
    assert error.message == "'mirostat_target' must be at most 100 bits. Given: 101."


def test_conflict_08_target_below_one_is_refused() -> None:
    error = refusal(mirostat_target=0.5)
    assert error.message == "'mirostat_target' must be a perplexity of at least 1. Given: 0.5."
    assert error.param == "mirostat_target"


@all_cases("fireworks", ["mirostat_target", "mirostat_lr"])
@all_cases("llamacpp", ["mirostat", "mirostat_tau", "mirostat_eta"])
def test_conflict_08_both_families_of_names_are_refused(fireworks: str, llamacpp: str) -> None:
    error = refusal(**{fireworks: 2, llamacpp: 2})
    assert error.message == (
        f"'{fireworks}' cannot be combined with '{llamacpp}': both configure Mirostat."
    )
    assert error.param == fireworks


@all_cases("profile", EVERY_PROFILE)
def test_conflict_09_suffix_is_infill_or_literal(profile: Profile) -> None:
    request = read(profile, suffix="end")
    assert request.suffix == "end"
    assert request.profile.is_suffix_literal is (profile is MISTRALRS)


@all_cases("profile", [OPENAI, FIREWORKS, LLAMACPP, OMLX, VLLM])
def test_conflict_10_best_of_samples_more_than_n(profile: Profile) -> None:
    request = read(profile, n=2, best_of=5)
    assert (request.n, request.best_of, request.ranking) == (2, 5, Ranking.MEAN)
    assert refusal(profile, n=3, best_of=2).message == "'best_of' must be at least n (3). Given: 2."


def test_conflict_10_best_of_in_mistralrs_returns_n() -> None:
    request = read(MISTRALRS, n=5, best_of=2)
    assert (request.n, request.best_of, request.ranking) == (2, 5, Ranking.SUM)
    request = read(MISTRALRS, n=3, best_of=3)
    assert (request.n, request.best_of, request.ranking) == (3, 3, Ranking.SUM)
    error = refusal(MISTRALRS, n=2, best_of=3)
    assert error.message == "'best_of' must be at most n (2) in this dialect. Given: 3."


def test_conflict_10_ranked_choices_cannot_be_streamed() -> None:
    assert refusal(MISTRALRS, n=3, best_of=2, stream=True).param == "best_of"
    request = read(MISTRALRS, n=3, best_of=3, stream=True)
    assert (request.n, request.best_of, request.ranking) == (3, 3, Ranking.MEAN)


@all_cases(
    ("profile", "most"),
    [(OPENAI, 5), (FIREWORKS, 5), (LLAMACPP, 20), (MISTRALRS, 20), (OMLX, 20), (VLLM, 20)],
)
def test_conflict_11_logprobs_type(profile: Profile, most: int) -> None:
    for given, expected in (
        (True, 1),
        (False, None),
        (None, None),
        (0, 0),
        (3.0, 3),
        (most, most),
    ):
        assert read(profile, logprobs=given).logprobs == expected
    error = refusal(profile, logprobs=most + 1)
    assert error.message == f"'logprobs' must be at most {most}. Given: {most + 1}."
    assert refusal(profile, logprobs=-1).message == "'logprobs' must be at least 0. Given: -1."
    error = refusal(profile, n_probs=most + 1)
    assert error.message == f"'n_probs' must be at most {most}. Given: {most + 1}."


def test_conflict_11_no_alternatives_are_not_no_logprobs() -> None:
    assert read(n_probs=0).logprobs is None
    assert read(n_probs=2).logprobs == 2
    assert read(logprobs=0).logprobs == 0
    assert read(logprobs=0, n_probs=0).logprobs == 0
    assert refusal(logprobs=1, n_probs=2).param == "n_probs"
    assert read(logprobs=True, top_logprobs=3).logprobs == 3
    assert read(logprobs=True, top_logprobs=0).logprobs == 0
    assert refusal(logprobs=2, top_logprobs=3).param == "top_logprobs"
    assert refusal(top_logprobs=3).message.startswith("'top_logprobs' requires 'logprobs' true.")


def test_conflict_11_fireworks_today_returns_objects_for_true() -> None:
    request = read(FIREWORKS_2026, logprobs=True, top_logprobs=2)
    assert (request.has_scored_objects, request.logprobs) == (True, 2)
    assert read(FIREWORKS_2026, logprobs=True).logprobs == 0
    for lists in (read(FIREWORKS_2026, logprobs=2), read(FIREWORKS, logprobs=True)):
        assert not lists.has_scored_objects


@all_cases(
    ("given", "expected"),
    [
        ({"grammar": "root ::= x"}, (StructureKind.GBNF, "root ::= x")),
        (
            {"grammar": "root ::= x", "grammar_syntax": "gbnf"},
            (StructureKind.GBNF, "root ::= x"),
        ),
        (
            {"grammar": "start: x", "grammar_syntax": "lark"},
            (StructureKind.LARK, "start: x"),
        ),
        ({"grammar": {"type": "regex", "value": "a+"}}, (StructureKind.REGEX, "a+")),
        ({"grammar": {"type": "lark", "value": "start: x"}}, (StructureKind.LARK, "start: x")),
        ({"grammar": {"type": "json_schema", "value": {}}}, (StructureKind.JSON_SCHEMA, {})),
        (
            {"grammar": {"type": "llguidance", "value": {"grammars": []}}},
            (StructureKind.LLGUIDANCE, {"grammars": []}),
        ),
        ({"grammar": {"type": "llguidance", "value": "x"}}, (StructureKind.LLGUIDANCE, "x")),
    ],
)
def test_conflict_12_grammar_type(
    given: dict[str, Any], expected: tuple[StructureKind, Any]
) -> None:
    for profile in PROFILES.values():
        assert read(profile, **given).structure == Structure(*expected, "grammar")


def test_conflict_13_single_quotes_reach_the_compiler_as_they_are() -> None:
    source = "root ::= ('+' | '-') [0-9]+"
    assert read(grammar=source).structure == Structure(StructureKind.GBNF, source, "grammar")


@all_cases("profile", EVERY_PROFILE)
def test_conflict_14_schema_of_a_json_object_is_applied(profile: Profile) -> None:
    schema = {"type": "object", "required": ["a"]}
    request = read(profile, response_format={"type": "json_object", "schema": schema})
    assert request.structure == Structure(
        StructureKind.JSON_SCHEMA, schema, "response_format", is_strict=False
    )
    request = read(profile, response_format={"type": "json_object"})
    assert request.structure == Structure(StructureKind.JSON_OBJECT, None, "response_format")


@all_cases("profile", EVERY_PROFILE)
def test_conflict_15_values_that_disable_truncation(profile: Profile) -> None:
    for top_k in (0, -1):
        assert read(profile, top_k=top_k).sampling.top_k == 0
    assert 0 < read(profile, top_p=0).sampling.top_p < 1e-5
    assert read(profile, top_k=10**6).sampling.top_k == 10**6


@all_cases("profile", EVERY_PROFILE)
def test_conflict_16_range_edges_are_inclusive(profile: Profile) -> None:
    for name, edges in {
        "n": (1, 128),
        "logprobs": (0, 5),
        "temperature": (0, 2),
        "top_p": (0, 1),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "top_k": (1, 128),
    }.items():
        for value in edges:
            assert read(profile, **{name: value})


def test_conflict_17_extra_usage_chunk_comes_on_request() -> None:
    request = read(FIREWORKS, stream=True, stream_options={"include_usage": True})
    assert request.include_usage
    assert request.profile.keeps_usage_in_final_chunk
    assert not read(FIREWORKS, stream=True).include_usage


@all_cases("profile", EVERY_PROFILE)
def test_conflict_21_several_choices_at_temperature_zero(profile: Profile) -> None:
    request = read(profile, n=3, temperature=0)
    assert (request.n, request.sampling.is_greedy) == (3, True)


@all_cases("profile", EVERY_PROFILE)
def test_conflict_22_seeds_have_64_bits(profile: Profile) -> None:
    for seed in (-(2**63), -2, 0, 2**32 - 1, 2**63 - 1):
        spec = read(profile, seed=seed).sampling
        assert (spec.seed, spec.is_seed_requested) == (seed, True)
    assert not read(profile, seed=-1).sampling.is_seed_requested


@all_cases("profile", EVERY_PROFILE)
def test_conflict_23_unknown_parameters_are_named_or_refused(profile: Profile) -> None:
    request = read(profile, zeta=1, alpha={"b": 2}, model_config=1, absent=None)
    assert request.ignored_parameters == ("alpha", "model_config", "zeta")
    with pytest.raises(UnknownParameterError) as caught:
        reject_ignored(request.ignored_parameters)
    assert caught.value.message == (
        "'alpha' is unknown or has no effect; this account rejects such parameters."
    )
    assert (caught.value.param, caught.value.code) == ("alpha", "unknown_parameter")
    reject_ignored(read(profile, temperature=0.5).ignored_parameters)


@all_cases("profile", EVERY_PROFILE)
def test_conflict_26_logit_bias_in_every_form(profile: Profile) -> None:
    request = read(profile, logit_bias={"5": 1, "6": -250, "7": False, "hello": 0.5, "x": False})
    assert request.sampling.logit_bias == {5: 1.0, 6: -100.0, 7: -math.inf}
    assert request.bias_texts == {"hello": 0.5, "x": -math.inf}
    request = read(profile, logit_bias=[[5, 1], [6, 250], [7, False], ["hello", 0.5]])
    assert request.sampling.logit_bias == {5: 1.0, 6: 100.0, 7: -math.inf}
    assert request.bias_texts == {"hello": 0.5}
