"""vLLM's parameters of a request, and room for image tokens; without vLLM."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from contract.sampling import (
    DEFAULT_SAMPLERS,
    Dry,
    RepetitionDetection,
    SamplerChain,
    SamplingSpec,
    Xtc,
)
from tests.support.cases import all_cases
from tests.worker.conftest import MODEL_FOLDER
from worker.engine.base import EngineRequest, InvalidRequestError
from worker.engine.vllm.arguments import MAX_BAD_WORD_TOKENS
from worker.engine.vllm.parameters import ParameterFactory
from worker.engine.vllm.prompts import fitting_max_tokens
from worker.samplers.arguments import chain_parameters

TYPES = SimpleNamespace(
    SamplingParams=SimpleNamespace,
    StructuredOutputsParams=SimpleNamespace,
    RepetitionDetectionParams=SimpleNamespace,
)


@pytest.fixture(scope="module")
def parameters() -> ParameterFactory:
    return maker(seeds_cost_time=True)


def maker(*, seeds_cost_time: bool) -> ParameterFactory:
    content = (MODEL_FOLDER / "tokenizer.json").read_bytes()
    return ParameterFactory(TYPES, content, [1], seeds_cost_time=seeds_cost_time)


def request(spec: SamplingSpec | None = None, **changes: Any) -> EngineRequest:
    fields: dict[str, Any] = {
        "id": "r1",
        "prompt_token_ids": [5, 6, 7],
        "max_tokens": 10,
        "sampling": spec or SamplingSpec(seed=1),
        "seed": 3,
        "cache_salt": "",
    }
    return EngineRequest(**{**fields, **changes})


def made(parameters: ParameterFactory, each: EngineRequest, max_tokens: int = 10) -> Any:
    return parameters.make(each, prompt_tokens=3, max_tokens=max_tokens)


def test_vllm_samples_requests_without_a_chain(parameters: ParameterFactory) -> None:
    spec = SamplingSpec(seed=1, temperature=0.5, top_p=0.0, top_k=7, min_p=0.1, stop_token_ids=[4])
    params = made(parameters, request(spec))
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 1e-6, 7, 0.1)
    assert (params.seed, params.extra_args, params.stop_token_ids) == (3, None, [4])
    assert params.structured_outputs is params.repetition_detection is None


@pytest.mark.parametrize(("temperature", "left"), [(0.7, 1.0), (0.0, 0.0)])
def test_chain_gets_all_parameters_except_forbidden_tokens(
    parameters: ParameterFactory, temperature: float, left: float
) -> None:
    chain = SamplerChain(
        order=list(DEFAULT_SAMPLERS),
        xtc=Xtc(0.5, 0.1, spares_special=True),
        dry=Dry(0.8, 1.75, 2, -1, ["\n"]),
    )
    spec = SamplingSpec(
        seed=1,
        temperature=temperature,
        top_k=7,
        presence_penalty=1.0,
        logit_bias={9: float("-inf")},
        bad_words=["x"],
        chain=chain,
    )
    params = made(parameters, request(spec))
    native = {"temperature", "top_k", "top_p", "min_p", "presence_penalty"}
    assert native & set(vars(params)) == {"temperature"}
    assert params.temperature == left
    assert (params.logit_bias, params.bad_words) == ({9: float("-inf")}, ["x"])
    inside = chain_parameters(params.extra_args)
    assert inside is not None
    assert (inside.temperature, inside.top_k, inside.seed) == (temperature, 7, 3)
    assert 1 in inside.xtc_spared
    assert len(inside.xtc_spared) > 1, "the line end is spared, too"
    assert inside.dry_breakers


@all_cases("logprobs", [None, 0, 2])
def test_chain_reports_only_where_the_engine_does(
    parameters: ParameterFactory, logprobs: int | None
) -> None:
    spec = SamplingSpec(seed=1, chain=SamplerChain(order=[], reports_probabilities=True))
    found = chain_parameters(made(parameters, request(spec, logprobs=logprobs)).extra_args)
    assert found is not None
    assert found.reports_probabilities is (logprobs is not None)


def test_sequences_of_a_job_differ_in_seed_only(parameters: ParameterFactory) -> None:
    spec = SamplingSpec(seed=1, chain=SamplerChain(order=[]))
    first = request(spec, prompt_logprobs=2)
    params = made(parameters, first)
    varied = parameters.vary(params, replace(first, id="r2", seed=4, prompt_logprobs=None))
    seeds = [chain_parameters(each.extra_args) for each in (params, varied)]
    assert [each and each.seed for each in seeds] == [3, 4]
    assert (params.seed, varied.seed) == (3, 4)
    assert (params.skip_reading_prefix_cache, varied.skip_reading_prefix_cache) == (True, False)
    same = {"seed", "extra_args", "prompt_logprobs", "skip_reading_prefix_cache"}
    assert {k: v for k, v in vars(params).items() if k not in same} == {
        k: v for k, v in vars(varied).items() if k not in same
    }


def test_default_seed_is_omitted_where_it_costs_time(
    parameters: ParameterFactory,
) -> None:
    unasked = request(SamplingSpec(seed=1, is_seed_requested=False))
    assert made(parameters, unasked).seed is None
    assert made(maker(seeds_cost_time=False), unasked).seed == 3


def test_other_fields_are_passed_on(parameters: ParameterFactory) -> None:
    spec = SamplingSpec(
        seed=1,
        min_tokens=50,
        allowed_token_ids=[4, 5],
        repetition_detection=RepetitionDetection(3, 1, 4),
    )
    params = made(parameters, request(spec, grammar="start: /a/", reads_prefix_cache=False), 8)
    assert params.min_tokens == 8, "vLLM takes no more than max_tokens"
    assert params.allowed_token_ids == [4, 5]
    assert vars(params.repetition_detection) == {
        "max_pattern_size": 3,
        "min_pattern_size": 1,
        "min_count": 4,
    }
    assert params.structured_outputs.grammar == "start: /a/"
    assert params.skip_reading_prefix_cache is True


def ids_of(text: str) -> list[int]:
    return Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json")).encode(text).ids


@pytest.mark.parametrize("word", ["jumps", " jumps", "the"])
def test_bad_words_are_excluded_with_and_without_a_space(
    parameters: ParameterFactory, word: str
) -> None:
    params = SimpleNamespace(bad_words=[word, word], _bad_words_token_ids=[[1]])
    parameters.forbid_words(params)
    bare = word.lstrip()
    assert sorted(params._bad_words_token_ids) == sorted([ids_of(bare), ids_of(f" {bare}")])


def test_nothing_is_forbidden_without_bad_words(parameters: ParameterFactory) -> None:
    params = SimpleNamespace(bad_words=[], _bad_words_token_ids=None)
    parameters.forbid_words(params)
    assert params._bad_words_token_ids is None


def test_bad_words_of_too_many_tokens_are_refused(parameters: ParameterFactory) -> None:
    words = ["\u65e5" * (MAX_BAD_WORD_TOKENS // 3 // 2 - 1)]
    params = SimpleNamespace(bad_words=words, _bad_words_token_ids=None)
    parameters.forbid_words(params)
    assert len(params._bad_words_token_ids) == 2
    params.bad_words = ["\u65e5" * (MAX_BAD_WORD_TOKENS // 3)]
    with pytest.raises(InvalidRequestError, match="'bad_words' must have at most 4096 tokens"):
        parameters.forbid_words(params)


def test_images_lower_max_tokens_only_where_that_is_allowed() -> None:
    plain, seeing = request(), request(images=[b""])
    assert fitting_max_tokens(plain, 95, 100) == 10, "vLLM itself refuses the impossible"
    assert fitting_max_tokens(seeing, 90, 100) == 10
    assert fitting_max_tokens(seeing, 95, 100) == 5
    with pytest.raises(InvalidRequestError, match=r"Given: 95 \+ 10"):
        fitting_max_tokens(replace(seeing, may_shorten=False), 95, 100)
    with pytest.raises(InvalidRequestError, match="has 100 tokens, which must be less than"):
        fitting_max_tokens(seeing, 100, 100)
