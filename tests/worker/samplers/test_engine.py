"""The chain inside vLLM, on both of its model runners, against the reference.

The newer runner, which GPUs use, runs here in Triton's interpreter, with and without scheduling
ahead. A token takes some 25 ms there, so these tests generate fewer.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray
from tokenizers import Tokenizer

from contract.sampling import (
    DEFAULT_SAMPLERS,
    Dry,
    Mirostat,
    Sampler,
    SamplerChain,
    SamplingSpec,
    Xtc,
)
from tests.worker.samplers import reference
from tests.worker.samplers.conftest import Runners
from tests.worker.samplers.engines import (
    MAX_SEQUENCES,
    MODEL_FOLDER,
    VOCABULARY,
    Completion,
    Engines,
    RefusedError,
    Request,
    Side,
)
from worker.samplers.arguments import chain_parameters
from worker.samplers.parameters import SequenceChain

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Probabilities = NDArray[np.float64]

TOKENIZER = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
PROMPT = TOKENIZER.encode('def read(self, size):\n    """Read the size. Read the').ids
BREAKERS = [(TOKENIZER.encode(text).ids, list[int]()) for text in (".", ":")]

ALL = list(DEFAULT_SAMPLERS)
FEW = [300, 301, 302, 303, 304, 305]
"""With only these tokens, any model repeats itself and hesitates."""
LLAMA_CPP = SamplingSpec(
    seed=11,
    temperature=0.8,
    top_k=40,
    top_p=0.95,
    min_p=0.05,
    repetition_penalty=1.1,
    chain=SamplerChain(order=ALL, penalty_last_n=64),
)
XTC = SamplingSpec(seed=12, chain=SamplerChain(order=ALL, xtc=Xtc(0.5, 0.05)))
DRY = SamplingSpec(
    seed=13,
    top_k=20,
    chain=SamplerChain(
        order=ALL, dry=Dry(multiplier=4.0, base=1.75, allowed_length=1, last_n=-1, breakers=[])
    ),
)
TYPICAL = SamplingSpec(
    seed=14,
    temperature=1.5,
    chain=SamplerChain(order=ALL[::-1], typical_p=0.5, dynatemp_range=0.5, min_keep=2),
)
SIGMA = SamplingSpec(
    seed=15,
    frequency_penalty=1.0,
    chain=SamplerChain(order=ALL, top_n_sigma=1.0, penalty_last_n=8, penalizes_prompt=False),
)
MIROSTAT = SamplingSpec(
    seed=16, temperature=2.0, chain=SamplerChain(order=ALL, mirostat=Mirostat(2, 3.0, 0.1))
)
MIROSTAT_1 = SamplingSpec(
    seed=17, temperature=1.5, chain=SamplerChain(order=ALL, mirostat=Mirostat(1, 2.0, 0.2))
)
FLAT_XTC = replace(
    XTC,
    temperature=2.0,
    allowed_token_ids=FEW,
    chain=SamplerChain(order=[Sampler.TEMPERATURE, Sampler.XTC], xtc=Xtc(0.5, 0.1)),
)
FLAT_DRY = replace(
    DRY,
    temperature=2.0,
    allowed_token_ids=FEW,
    chain=SamplerChain(order=ALL, dry=Dry(2.0, 1.75, 1, last_n=-1, breakers=[])),
)
GREEDY = SamplingSpec(seed=0, temperature=0.0)
CHAINED = (LLAMA_CPP, XTC, DRY, TYPICAL, SIGMA, MIROSTAT, MIROSTAT_1, replace(DRY, temperature=0.0))
UNCHAINED = (GREEDY, SamplingSpec(seed=21), SamplingSpec(seed=22, top_p=0.9, top_k=50, min_p=0.01))


@pytest.fixture
def fast(runners: Runners) -> Engines:
    """The older runner, for tests with many tokens."""
    return runners("v1")


def test_each_engine_has_its_runner_and_scheduling(side: Side) -> None:
    folder = "" if side.is_fast else "cpu."
    runner = "cpu_model_runner" if side.is_fast else "model_runner"
    module, is_ahead = side.engines.descriptions[side.name]
    assert module == f"vllm.v1.worker.{folder}{runner}"
    assert is_ahead == (side.name == "ahead")


def test_sampled_tokens_are_among_those_the_reference_keeps(side: Side) -> None:
    requests = [
        Request(
            prompt=PROMPT,
            max_tokens=60 if side.is_fast else 8,
            sampling=spec,
            breakers=BREAKERS,
            wants_logprobs=True,
        )
        for spec in CHAINED
        if not spec.is_greedy
    ]
    outside = removed = 0.0
    for request, completion in zip(requests, side.generate(requests), strict=True):
        for logprobs, kept, token in replayed(request, completion):
            outside += kept[token] == 0.0
            removed += np.exp(logprobs)[kept == 0.0].sum()
    # Without the chain, about `removed` tokens would have been outside. One may be, by rounding.
    assert removed > 8
    assert outside <= 1


@pytest.mark.parametrize("spec", [DRY, SIGMA], ids=["dry", "penalties"])
def test_greedy_takes_the_maximum_after_the_penalties(side: Side, spec: SamplingSpec) -> None:
    request = Request(
        prompt=PROMPT,
        max_tokens=60 if side.is_fast else 16,
        sampling=replace(spec, temperature=0.0, allowed_token_ids=FEW),
        breakers=[([300], [])],
        wants_logprobs=True,
    )
    others = [Request(prompt=PROMPT, sampling=LLAMA_CPP, max_tokens=4)] if side.is_fast else []
    completion = side.generate([request, *others])[0]
    unlike = 0
    for position, token in enumerate(completion.tokens):
        logprobs = visible(request, logprobs_of(completion)[position])
        before = [*request.prompt, *completion.tokens[:position]]
        logits = reference.chain_logits(logprobs, parameters_of(request), before)
        assert logits[token] > logits.max() - 1e-3
        unlike += token != logprobs.argmax()
    assert unlike >= 3


def test_probabilities_after_the_chain_are_reported_on_request(side: Side) -> None:
    length = 20 if side.is_fast else 4
    # The reference begins with log-probabilities, to which a repetition penalty does not apply.
    truncated = replace(LLAMA_CPP, repetition_penalty=1.0)
    specs = [truncated, DRY, SIGMA, MIROSTAT, replace(DRY, temperature=0.0)]
    plain = [
        Request(
            prompt=PROMPT, max_tokens=length, sampling=spec, breakers=BREAKERS, wants_logprobs=True
        )
        for spec in specs
    ]
    reporting = [
        dataclasses.replace(request, sampling=reported(request.sampling)) for request in plain
    ]
    # Together, so that only some rows of a step are replaced.
    completions = side.generate([*plain, *reporting])
    own, final = completions[: len(plain)], completions[len(plain) :]
    for request, before, after in zip(plain, own, final, strict=True):
        assert after.tokens == before.tokens
        found = np.exp(logprobs_of(after))
        if request.sampling.is_greedy:
            assert [found[at][token] for at, token in enumerate(after.tokens)] == [1.0] * length
            continue
        for at, (_, kept, _) in enumerate(replayed(request, before)):
            np.testing.assert_allclose(found[at], kept, atol=1e-4, err_msg=str(request.sampling))


def reported(spec: SamplingSpec) -> SamplingSpec:
    assert spec.chain is not None
    return replace(spec, chain=replace(spec.chain, reports_probabilities=True))


@pytest.mark.long
@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_meets_its_target(fast: Engines, version: int) -> None:
    # The model prefers none of these tokens so much that the target is out of reach.
    flat = SamplingSpec(
        seed=0,
        temperature=2.0,
        allowed_token_ids=list(range(300, 400)),
        chain=SamplerChain(order=ALL, mirostat=Mirostat(version, 3.0, 0.1)),
    )
    requests = [
        Request(
            prompt=PROMPT,
            max_tokens=500,
            sampling=replace(flat, seed=seed),
            wants_logprobs=True,
        )
        for seed in range(8)
    ]
    surprises = [
        -math.log2(max(kept[token], 1e-9))
        for request, completion in zip(requests, fast.generate(requests), strict=True)
        for _, kept, token in replayed(request, completion)
    ]
    assert len(surprises) == 8 * 500
    assert abs(sum(surprises) / len(surprises) - 3.0) < 0.05 * 3.0


def test_tokens_do_not_depend_on_the_batch(side: Side) -> None:
    """They depend neither on the rest of the batch nor, without a chain, on the processor."""
    length = 24 if side.is_fast else 3
    specs = [*CHAINED[:4], *(replace(each, seed=seed) for seed in range(4) for each in UNCHAINED)]
    requests = [
        Request(prompt=PROMPT[number % 4 :], max_tokens=length, sampling=spec, breakers=BREAKERS)
        for number, spec in enumerate(specs)
    ]
    assert len(requests) == MAX_SEQUENCES
    together = [each.tokens for each in side.generate(requests)]
    alone = [side.generate([request])[0].tokens for request in requests[:4]]
    assert together[:4] == alone
    if "plain" not in side.engines.descriptions:
        return
    bare = [Request(prompt=each.prompt, max_tokens=length) for each in requests[:4]]
    unloaded = side.engines.generate([*bare, *requests[4:]], "plain")
    assert together[4:] == [each.tokens for each in unloaded[4:]]


def test_joining_and_leaving_sequences_do_not_disturb_each_other(side: Side) -> None:
    random = Random(1)
    requests = [
        Request(
            prompt=random.choices(range(10, VOCABULARY), k=random.randint(1, 30)),
            max_tokens=random.randint(1, 12 if side.is_fast else 3),
            sampling=replace((CHAINED + UNCHAINED)[number % 11], seed=number),
            breakers=BREAKERS,
        )
        for number in range(200 if side.is_fast else MAX_SEQUENCES + 2)
    ]
    forwards = [each.tokens for each in side.generate(requests)]
    backwards = [each.tokens for each in side.generate(requests[::-1])][::-1]
    assert forwards == backwards


@pytest.mark.long
@pytest.mark.parametrize("spec", [FLAT_XTC, FLAT_DRY], ids=["xtc", "dry"])
def test_first_tokens_follow_the_distribution_of_the_reference(
    fast: Engines, spec: SamplingSpec
) -> None:
    count = 1_000
    # The likeliest allowed token followed the last token of the prompt before.
    first = replace(GREEDY, allowed_token_ids=FEW)
    likeliest = fast.generate([Request(prompt=PROMPT, sampling=first, max_tokens=1)])[0].tokens
    prompt = [PROMPT[-1], *likeliest, *PROMPT]
    requests = [
        Request(
            prompt=prompt, max_tokens=1, sampling=replace(spec, seed=seed), wants_logprobs=not seed
        )
        for seed in range(count)
    ]
    completions = fast.generate(requests)
    logprobs = visible(requests[0], logprobs_of(completions[0])[0])
    # XTC draws a number for each seed; nothing else in these chains depends on it.
    draws = [reference.draw(seed, len(prompt)) <= 0.5 for seed in range(count)]
    spread = {hit: kept_by(requests[draws.index(hit)], logprobs, []) for hit in (True, False)}
    expected = np.sum([spread[hit] for hit in draws], axis=0)
    counts = np.bincount([each.tokens[0] for each in completions], minlength=VOCABULARY)
    assert counts[expected == 0].sum() == 0
    assert is_plausible(counts, expected)
    unchained = reference.distribution(logprobs / spec.temperature)
    assert not is_plausible(counts, count * unchained)


def test_chain_never_restores_tokens_forbidden_by_a_grammar(side: Side) -> None:
    requests = [
        Request(
            prompt=PROMPT,
            max_tokens=4,
            sampling=spec,
            breakers=BREAKERS,
            grammar="start: /[0-9]{40}/",
        )
        for spec in CHAINED
    ]
    texts = [TOKENIZER.decode(each.tokens) for each in side.generate(requests)]
    assert [text for text in texts if not (text.isdigit() and text.isascii())] == []


def test_token_is_forbidden_if_all_are_and_the_batch_does_not_change(side: Side) -> None:
    """So the engine finds a forbidden token and ends the sequence (`worker.engine.vllm.bans`)."""
    others = [Request(prompt=PROMPT, max_tokens=4, sampling=spec) for spec in UNCHAINED]
    alone = side.generate(others)
    nothing = {"allowed_token_ids": [7], "logit_bias": {7: -math.inf}}
    stuck = [
        Request(prompt=PROMPT, max_tokens=4, sampling=replace(spec, **nothing))
        for spec in (*UNCHAINED, *CHAINED)
    ]
    together = side.generate([*others, *stuck])
    assert [each.tokens for each in together[: len(others)]] == [each.tokens for each in alone]
    assert all(0 <= token < VOCABULARY for each in together for token in each.tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (5, "malformed"),
        ({"order": ["nonsense"]}, "malformed"),
        ({"temperature": -1.0}, "'temperature' of the sampler chain must be >= 0.0"),
        ({"xtc_spared": [-1]}, "'token id' of the sampler chain"),
        ({"nonsense": 1}, "no parameter nonsense"),
    ],
    ids=["no mapping", "order", "bounds", "token id", "unknown"],
)
def test_malformed_chain_is_refused_and_the_engine_survives(
    side: Side, arguments: object, message: str
) -> None:
    with pytest.raises(RefusedError, match=message):
        side.generate([Request(prompt=PROMPT, extra_args={"sluice_chain": arguments})])
    assert len(side.generate([Request(prompt=PROMPT, max_tokens=1)])[0].tokens) == 1


def parameters_of(request: Request) -> SequenceChain:
    parameters = chain_parameters(request.arguments()["extra_args"])
    assert parameters is not None
    return parameters


def logprobs_of(completion: Completion) -> Probabilities:
    assert completion.logprobs is not None
    return completion.logprobs


def visible(request: Request, logprobs: Probabilities) -> Probabilities:
    """The chain's input: the logits of allowed tokens only."""
    allowed = request.sampling.allowed_token_ids
    seen = np.full_like(logprobs, -np.inf)
    seen[allowed] = logprobs[allowed]
    return seen if allowed else logprobs


def kept_by(request: Request, logprobs: Probabilities, output: Sequence[int]) -> Probabilities:
    """The probabilities that the reference samples from."""
    logits = reference.chain_logits(logprobs, parameters_of(request), [*request.prompt, *output])
    return reference.distribution(logits)


def replayed(
    request: Request, completion: Completion
) -> Iterator[tuple[Probabilities, Probabilities, int]]:
    """Yield the chain's log-probabilities, the reference's probabilities and the token."""
    parameters = parameters_of(request)
    mu = parameters.initial_mu
    for position, token in enumerate(completion.tokens):
        logprobs = visible(request, logprobs_of(completion)[position])
        if parameters.uses_mirostat:
            kept = reference.mirostat_probabilities(logprobs, parameters, mu)
            if kept[token] > 0:
                mu -= parameters.mirostat_eta * (-math.log2(kept[token]) - parameters.mirostat_tau)
        else:
            kept = kept_by(request, logprobs, completion.tokens[:position])
        yield logprobs, kept, token


def is_plausible(counts: NDArray[np.int64], expected: Probabilities) -> bool:
    """Whether counts fit expected ones, by the chi-square test at about one in ten thousand."""
    is_rare = expected < 5
    seen = [*counts[~is_rare], counts[is_rare].sum()]
    due = [*expected[~is_rare], max(expected[is_rare].sum(), 1e-9)]
    statistic = sum((a - b) ** 2 / b for a, b in zip(seen, due, strict=True))
    freedom = len(seen) - 1
    # Wilson and Hilferty: the cube root of chi-square over its freedom is nearly normal.
    spread = 2 / (9 * freedom)
    return bool(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 3.7)
