"""When a request gets a sampler chain, and what is in it."""

from typing import Any

from contract.sampling import DEFAULT_SAMPLERS, Dry, Sampler, SamplerChain, SamplingSpec, Xtc
from gateway.dialects.profile import PROFILES, Profile
from tests.gateway.dialects.reading import (
    EVERY_PROFILE,
    FIREWORKS,
    LLAMACPP,
    MISTRALRS,
    OMLX,
    OPENAI,
    VLLM,
    read,
    refusal,
)
from tests.support.cases import all_cases

NATIVE = [OPENAI, FIREWORKS, MISTRALRS, OMLX, VLLM]
BREAKERS = ["\n", ":", '"', "*"]


def spec_of(profile: Profile = OPENAI, /, **parameters: Any) -> SamplingSpec:
    """Return how a request with these parameters is sampled."""
    return read(profile, **parameters).sampling


def chain_of(profile: Profile = OPENAI, /, **parameters: Any) -> SamplerChain:
    """Return the chain of a request that needs one."""
    chain = spec_of(profile, **parameters).chain
    assert chain is not None
    return chain


@all_cases(
    "plain",
    [
        {},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.5},
        {"repetition_penalty": 1.5, "repeat_last_n": -1},
        {"repeat_last_n": 64},
        {"xtc_probability": 0, "xtc_threshold": 0.1},
        {"xtc_threshold": 0.1},
        {"dry_base": 2, "dry_allowed_length": 3, "dry_sequence_breakers": ["x"]},
        {"dry_multiplier": 0},
        {"dry_multiplier": 1, "dry_penalty_last_n": 0},
        {"typical_p": 1, "top_n_sigma": 0, "dynatemp_range": 0},
        {"top_n_sigma": -1, "dynatemp_exponent": 2},
        {"min_keep": 5},
        {"min_keep": 1, "top_k": 5},
        {"mirostat": 0, "mirostat_tau": 3},
    ],
)
def test_request_that_every_engine_can_sample_needs_no_chain(plain: dict[str, Any]) -> None:
    for profile in NATIVE:
        assert spec_of(profile, **plain).chain is None, profile.name


@all_cases(
    ("given", "field", "expected"),
    [
        ({"typical_p": 0.9}, "typical_p", 0.9),
        ({"top_n_sigma": 1.5}, "top_n_sigma", 1.5),
        ({"dynatemp_range": 0.5}, "dynatemp_range", 0.5),
        ({"dynatemp_range": 0.5, "dynatemp_exponent": 2}, "dynatemp_exponent", 2.0),
        ({"min_keep": 2, "top_k": 5}, "min_keep", 2),
        ({"min_keep": 2, "top_p": 0.5}, "min_keep", 2),
        ({"min_keep": 2, "min_p": 0.5}, "min_keep", 2),
        ({"repeat_last_n": 5, "repetition_penalty": 1.2}, "penalty_last_n", 5),
        ({"repeat_last_n": 5, "presence_penalty": 1}, "penalizes_prompt", False),
        ({"xtc_probability": 0.5}, "xtc", Xtc(0.5, 0.1)),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, "xtc", Xtc(0.5, 0.2)),
        ({"dry_multiplier": 0.8}, "dry", Dry(0.8, 1.75, 2, -1, BREAKERS)),
        (
            {
                "dry_multiplier": 0.8,
                "dry_base": 1.5,
                "dry_allowed_length": 4,
                "dry_penalty_last_n": 100,
                "dry_sequence_breakers": ["."],
            },
            "dry",
            Dry(0.8, 1.5, 4, 100, ["."]),
        ),
        ({"dry_multiplier": 0.8, "dry_base": 0.5}, "dry", Dry(0.8, 1.75, 2, -1, BREAKERS)),
        ({"samplers": ["top_k"]}, "order", [Sampler.TOP_K]),
        ({"samplers": []}, "order", []),
    ],
)
def test_request_that_some_engines_cannot_sample_gets_a_chain(
    given: dict[str, Any], field: str, expected: Any
) -> None:
    for profile in (OPENAI, FIREWORKS, MISTRALRS, VLLM):
        chain = chain_of(profile, **given)
        assert getattr(chain, field) == expected, profile.name
        if "samplers" not in given:
            assert chain.order == list(DEFAULT_SAMPLERS), profile.name


def test_xtc_of_omlx_spares_special_tokens_and_refuses_high_thresholds() -> None:
    assert chain_of(OMLX, xtc_probability=0.5, xtc_threshold=0.5).xtc == Xtc(
        0.5, 0.5, spares_special=True
    )
    error = refusal(OMLX, xtc_probability=0.5, xtc_threshold=0.6)
    assert error.message == "'xtc_threshold' must be at most 0.5. Given: 0.6."
    assert error.param == "xtc_threshold"


@all_cases("profile", [OPENAI, FIREWORKS, MISTRALRS, VLLM])
def test_xtc_with_a_high_threshold_is_off(profile: Profile) -> None:
    assert spec_of(profile, xtc_probability=0.5, xtc_threshold=0.6).chain is None


def test_plain_sampling_of_llamacpp_follows_its_order() -> None:
    chain = chain_of(LLAMACPP)
    assert chain == SamplerChain(
        order=list(DEFAULT_SAMPLERS), penalty_last_n=64, penalizes_prompt=True
    )


def test_llamacpp_without_truncation_and_penalties_needs_no_order() -> None:
    spec = spec_of(LLAMACPP, top_k=0, top_p=1, min_p=0, repeat_penalty=1)
    assert spec.chain is None
    assert spec.temperature == 0.8


@all_cases(
    "names",
    [
        [
            "penalties",
            "dry",
            "top_n_sigma",
            "top_k",
            "typ_p",
            "top_p",
            "min_p",
            "xtc",
            "temperature",
        ],
        ["penalties", "dry", "top-n-sigma", "top-k", "typ-p", "top-p", "min-p", "xtc", "temp"],
        ["PENALTIES", "Dry", "topnsigma", "topk", "typ", "nucleus", "minp", "XTC", "temp"],
        "edskypmxt",
    ],
    ids=["canonical", "dashes", "aliases", "letters"],
)
def test_samplers_are_read_in_every_spelling_of_llamacpp(names: Any) -> None:
    assert chain_of(samplers=names).order == list(DEFAULT_SAMPLERS)


def test_samplers_keep_their_order() -> None:
    assert chain_of(LLAMACPP, samplers=["temperature", "top_k"]).order == [
        Sampler.TEMPERATURE,
        Sampler.TOP_K,
    ]


@all_cases("name", ["infill", "adaptive_p", "greedy", "", 5, None, ["top_k"]])
def test_unknown_sampler_is_refused_naming_the_known_ones(name: Any) -> None:
    error = refusal(samplers=["top_k", name])
    assert error.message.startswith("'samplers' must contain only penalties, dry, top_n_sigma, ")
    assert error.param == "samplers"


@all_cases("names", [["top_k", "top-k"], "kk"])
def test_sampler_named_twice_is_refused(names: Any) -> None:
    assert refusal(samplers=names).message.startswith(
        "'samplers' must name each step at most once."
    )


@all_cases("value", [5, {}, True])
def test_samplers_of_a_wrong_type_are_refused(value: Any) -> None:
    assert refusal(samplers=value).message.startswith("'samplers' must be an array. Given: ")


def test_steps_missing_in_samplers_are_disabled() -> None:
    given = {
        "samplers": ["top_k"],
        "dry_multiplier": 1,
        "xtc_probability": 1,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "repetition_penalty": 1.5,
    }
    spec = spec_of(**given)
    chain = chain_of(**given)
    assert (chain.dry, chain.xtc) == (None, None)
    penalties = (spec.presence_penalty, spec.frequency_penalty, spec.repetition_penalty)
    assert penalties == (0.0, 0.0, 1.0)


@all_cases("profile", EVERY_PROFILE)
def test_window_of_no_tokens_disables_penalties(profile: Profile) -> None:
    spec = spec_of(profile, repeat_last_n=0, presence_penalty=1, repetition_penalty=1.5)
    assert (spec.presence_penalty, spec.repetition_penalty) == (0.0, 1.0)


@all_cases("given", [{"mirostat": 2}, {"mirostat_target": 4}])
def test_mirostat_replaces_everything_except_temperature(given: dict[str, Any]) -> None:
    for profile in PROFILES.values():
        others = {
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.5,
            "min_p": 0.1,
            "presence_penalty": 1,
            "repetition_penalty": 1.5,
            "dry_multiplier": 1,
            "typical_p": 0.5,
            "samplers": ["top_k"],
        }
        spec = spec_of(profile, seed=1, **given, **others)
        assert spec.chain is not None
        mirostat = spec.chain.mirostat
        assert spec == SamplingSpec(
            seed=1,
            temperature=0.7,
            chain=SamplerChain(order=[Sampler.TEMPERATURE], mirostat=mirostat),
        )
        assert mirostat is not None


GREEDY_WITHOUT_EFFECT: list[dict[str, Any]] = [
    {"mirostat": 2},
    {"xtc_probability": 1},
    {"typical_p": 0.5},
    {"top_n_sigma": 1},
    {"dynatemp_range": 1},
    {"min_keep": 5, "top_k": 3},
    {"samplers": ["top_k"]},
    {"repeat_last_n": 5, "repetition_penalty": 1.0},
    {"repetition_penalty": 1.5, "repeat_last_n": -1},
    {"presence_penalty": 1},
]


@all_cases("given", GREEDY_WITHOUT_EFFECT)
def test_greedy_request_needs_no_chain_for_samplers_without_effect(given: dict[str, Any]) -> None:
    for profile in NATIVE:
        assert spec_of(profile, temperature=0, **given).chain is None


def test_greedy_request_keeps_dry_and_windowed_penalties() -> None:
    everything = {"xtc_probability": 1, "typical_p": 0.5, "min_keep": 5}
    chain = chain_of(temperature=0, dry_multiplier=1, **everything)
    assert chain == SamplerChain(
        order=list(DEFAULT_SAMPLERS),
        penalizes_prompt=False,
        dry=Dry(1.0, 1.75, 2, -1, BREAKERS),
    )
    chain = chain_of(temperature=0, repetition_penalty=1.5, repeat_last_n=5, **everything)
    assert chain == SamplerChain(
        order=list(DEFAULT_SAMPLERS), penalty_last_n=5, penalizes_prompt=False
    )


def test_greedy_llamacpp_has_a_chain_for_its_window_only() -> None:
    assert chain_of(LLAMACPP, temperature=0).penalty_last_n == 64
    assert spec_of(LLAMACPP, temperature=0, repeat_penalty=1).chain is None
    assert chain_of(LLAMACPP, temperature=0, repeat_penalty=1, presence_penalty=1)


def test_greedy_llamacpp_counts_the_prompt_whatever_the_window() -> None:
    given: dict[str, Any] = {"temperature": 0, "repeat_penalty": 1, "repeat_last_n": -1}
    chain = chain_of(LLAMACPP, frequency_penalty=1, **given)
    assert (chain.penalty_last_n, chain.penalizes_prompt) == (-1, True)
    assert spec_of(LLAMACPP, **given).chain is None


def test_invalid_values_are_refused_even_without_effect() -> None:
    assert refusal(mirostat=2, samplers=["what"]).param == "samplers"
    assert refusal(temperature=0, mirostat_target=0.5).param == "mirostat_target"
    assert refusal(dry_sequence_breakers=[5]).param == "dry_sequence_breakers"
