"""Resumption on the real engine: the tokens after a cut equal the undisturbed ones.

The engine computes in float32: with fewer bits a CPU's results depend on the rest of the batch.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from contract.sampling import (
    DEFAULT_SAMPLERS,
    Dry,
    Mirostat,
    RepetitionDetection,
    SamplerChain,
    SamplingSpec,
    Xtc,
)
from tests.worker.conftest import MODEL_FOLDER
from tests.worker.real_engine import CONTEXT_WINDOW, EOS, EXACT, MARKS, EngineSlot
from worker.engine.base import (
    EngineRequest,
    InvalidRequestError,
    SequenceEnd,
    SequenceOutput,
    TokenScores,
)
from worker.engine.vllm.engine import VllmEngine

pytestmark = MARKS

TOKENIZER = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
PROMPT = TOKENIZER.encode('def read(self, size):\n    """').ids
FEW = [300, 301, 302, 303, 304, 305]
"""With no more tokens than these, any model repeats itself and hesitates."""
CUTS = (1, 7, 23)
"""Each sequence is also cut before its last token."""

ALL = list(DEFAULT_SAMPLERS)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 12},
        "kind": {"enum": ["alphanumerical", "alphabetical"]},
        "size": {"type": "integer", "minimum": 100, "maximum": 99999},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}
JSON = f"start: %json {json.dumps(SCHEMA)}"


def spec(**changes: Any) -> SamplingSpec:
    """Sampling so hot that even a confident small model gives varied tokens."""
    return SamplingSpec(**{"seed": 1234, "temperature": 1.6, **changes})


def greedy(**changes: Any) -> SamplingSpec:
    return spec(temperature=0.0, **changes)


def flat(**changes: Any) -> SamplingSpec:
    return spec(temperature=2.0, allowed_token_ids=FEW, **changes)


def chained(**changes: Any) -> SamplerChain:
    return SamplerChain(order=ALL, **changes)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a sequence is sampled, and its additional cuts."""

    sampling: SamplingSpec
    max_tokens: int = 40
    grammar: str = ""
    logprobs: int | None = None
    more_cuts: Sequence[int] = ()
    changes_as_prompt: bool = False
    """Whether the result would differ if earlier tokens counted as a part of the prompt."""


DRY = Dry(multiplier=4.0, base=1.75, allowed_length=1, last_n=-1, breakers=["\n"])
CASES = {
    "greedy": Case(sampling=greedy()),
    "seeded": Case(sampling=spec(), changes_as_prompt=True),
    "seeded at 1": Case(sampling=spec(temperature=1.0)),
    "truncated": Case(sampling=flat(top_k=5, top_p=0.9, min_p=0.02), changes_as_prompt=True),
    "frequency": Case(
        sampling=greedy(frequency_penalty=0.5, allowed_token_ids=FEW), changes_as_prompt=True
    ),
    "presence": Case(sampling=flat(presence_penalty=1.5), changes_as_prompt=True),
    "repetition": Case(sampling=greedy(repetition_penalty=1.3, allowed_token_ids=FEW)),
    "min_tokens": Case(
        sampling=greedy(min_tokens=30, logit_bias={EOS: 100.0}), changes_as_prompt=True
    ),
    "logit_bias": Case(sampling=flat(logit_bias={300: 2.0, 301: -math.inf})),
    "stop tokens": Case(
        sampling=spec(stop_token_ids=list(range(300, 420)), min_tokens=12),
        changes_as_prompt=True,
    ),
    "allowed": Case(sampling=spec(allowed_token_ids=list(range(300, 340)))),
    "repetition detection": Case(
        sampling=greedy(logit_bias={500: 100.0}, repetition_detection=RepetitionDetection(4, 1, 9)),
        more_cuts=(3,),
        changes_as_prompt=True,
    ),
    "json": Case(
        sampling=spec(),
        grammar=JSON,
        max_tokens=90,
        more_cuts=range(2, 60, 6),
        changes_as_prompt=True,
    ),
    "greedy json": Case(sampling=greedy(), grammar=JSON, max_tokens=90, more_cuts=range(2, 60, 6)),
    "logprobs": Case(sampling=spec(), logprobs=3),
    "chain": Case(
        sampling=flat(
            top_k=5,
            top_p=0.95,
            min_p=0.01,
            repetition_penalty=1.1,
            chain=chained(penalty_last_n=16),
        )
    ),
    "chain that spares the prompt": Case(
        sampling=greedy(
            frequency_penalty=0.5,
            allowed_token_ids=FEW,
            chain=chained(penalizes_prompt=False, penalty_last_n=8),
        ),
        changes_as_prompt=True,
    ),
    "dry": Case(sampling=flat(presence_penalty=1.0, chain=chained(dry=DRY))),
    "greedy dry": Case(sampling=greedy(allowed_token_ids=FEW, chain=chained(dry=DRY))),
    "xtc": Case(sampling=flat(chain=chained(xtc=Xtc(0.5, 0.1)))),
    "mirostat 1": Case(
        sampling=spec(chain=chained(mirostat=Mirostat(1, 3.0, 0.2))), changes_as_prompt=True
    ),
    "mirostat 2": Case(
        sampling=spec(chain=chained(mirostat=Mirostat(2, 3.0, 0.2))),
        logprobs=2,
        changes_as_prompt=True,
    ),
    "mirostat and json": Case(
        sampling=spec(chain=chained(mirostat=Mirostat(2, 3.0, 0.2))), grammar=JSON, max_tokens=90
    ),
    "long": Case(sampling=greedy(ignore_eos=True), max_tokens=300, more_cuts=(280,)),
}


@dataclass
class Reported:
    """The outputs of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenScores] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    end: SequenceEnd | None = None
    stop_token_id: int | None = None

    def add(self, output: SequenceOutput) -> None:
        assert self.end is None
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_tokens is not None:
            self.prompt_tokens.append(output.prompt_tokens)
        self.end, self.stop_token_id = output.end, output.stop_token_id


async def run(
    engine: VllmEngine, requests: Sequence[EngineRequest], aborted: str = ""
) -> dict[str, Reported]:
    """Run sequences together. Ignore the outputs of a sequence that was aborted before."""
    reported = {request.id: Reported() for request in requests}
    for request in requests:
        await engine.submit([request])
    await follow(engine, reported, aborted)
    return reported


async def follow(engine: VllmEngine, reported: dict[str, Reported], aborted: str = "") -> None:
    while any(each.end is None for each in reported.values()):
        for output in (await engine.step()).outputs:
            # The engine may have sampled an output of this sequence before it received the abort.
            if output.sequence_id != aborted:
                reported[output.sequence_id].add(output)


def request_of(case: Case, name: str, output: Sequence[int] = ()) -> EngineRequest:
    return EngineRequest(
        id=name,
        prompt_token_ids=PROMPT,
        output_token_ids=list(output),
        max_tokens=case.max_tokens,
        sampling=case.sampling,
        seed=case.sampling.seed,
        cache_salt="salt",
        logprobs=case.logprobs,
        grammar=case.grammar,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(engine_slot: EngineSlot) -> VllmEngine:
    return await engine_slot.engine(**EXACT)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def whole(engine: VllmEngine) -> dict[str, Reported]:
    """The undisturbed outputs of each case."""
    return await run(engine, [request_of(case, name) for name, case in CASES.items()])


def cuts(case: Case, whole: Reported) -> list[int]:
    last = len(whole.token_ids) - 1
    return sorted({cut for cut in (*CUTS, *case.more_cuts, last) if 0 < cut <= last})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def after_cuts(
    engine: VllmEngine, whole: dict[str, Reported]
) -> dict[tuple[str, int], Reported]:
    """The outputs after each cut of each case, all in the same batches."""
    requests = {
        (name, cut): request_of(case, f"{name} after {cut}", whole[name].token_ids[:cut])
        for name, case in CASES.items()
        for cut in cuts(case, whole[name])
    }
    reported = await run(engine, list(requests.values()))
    return {place: reported[request.id] for place, request in requests.items()}


@pytest.mark.parametrize("name", CASES)
async def test_tokens_after_a_cut_equal_the_undisturbed_tokens(
    whole: dict[str, Reported], after_cuts: dict[tuple[str, int], Reported], name: str
) -> None:
    case, undisturbed = CASES[name], whole[name]
    mine = {cut: rest for (of, cut), rest in after_cuts.items() if of == name}
    assert len(mine) > 2
    for cut, rest in mine.items():
        assert (cut, rest.token_ids) == (cut, undisturbed.token_ids[cut:])
        assert (rest.end, rest.stop_token_id) == (undisturbed.end, undisturbed.stop_token_id)
        assert rest.prompt_tokens == [len(PROMPT)]
        assert len(rest.logprobs) == (0 if case.logprobs is None else len(rest.token_ids))
        for ours, theirs in zip(rest.logprobs, undisturbed.logprobs[cut:], strict=True):
            # vLLM scores as many tokens as the most demanding sequence of a batch asks for.
            pairs = list(zip(ours, theirs, strict=False))
            assert len(pairs) > (case.logprobs or 0)
            for (token_id, logprob), (their_id, their_logprob) in pairs:
                assert token_id == their_id
                assert logprob == pytest.approx(their_logprob, abs=1e-4)


async def test_cases_cover_their_purpose(whole: dict[str, Reported]) -> None:
    ends = {
        name: (reported.end, reported.stop_token_id is not None) for name, reported in whole.items()
    }
    assert ends["greedy"] == (SequenceEnd.LENGTH, False)
    assert ends["stop tokens"] == (SequenceEnd.STOP, True)
    assert ends["min_tokens"] == (SequenceEnd.STOP, False)
    assert ends["repetition detection"] == (SequenceEnd.REPETITION, False)
    assert ends["json"] == ends["mirostat and json"] == (SequenceEnd.STOP, False)
    assert json.loads(TOKENIZER.decode(whole["json"].token_ids))
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, reported in whole.items():
        alike.setdefault(tuple(reported.token_ids), []).append(name)
    assert [names for names in alike.values() if len(names) > 1] == [["seeded", "logprobs"]]


@pytest.mark.slow
async def test_earlier_tokens_do_not_count_as_prompt(
    engine: VllmEngine, whole: dict[str, Reported]
) -> None:
    """The results differ; otherwise these cases would prove nothing."""
    requests = {
        (name, cut): EngineRequest(
            id=f"{name} with a prompt of {cut} more",
            prompt_token_ids=PROMPT + whole[name].token_ids[:cut],
            max_tokens=case.max_tokens - cut,
            sampling=case.sampling,
            seed=case.sampling.seed,
            cache_salt="salt",
            grammar=case.grammar,
        )
        for name, case in CASES.items()
        if case.changes_as_prompt
        for cut in cuts(case, whole[name])
    }

    reported = await run(engine, list(requests.values()))

    assert {name for name, _ in requests} == {
        name
        for (name, cut), request in requests.items()
        if reported[request.id].token_ids != whole[name].token_ids[cut:]
    }


THINK, THOUGHT = TOKENIZER.encode("<think></think>").ids
SUM = "<|user|>Think: what is 27 + 35?\n"
THINKING: dict[str, tuple[str, dict[str, Any]]] = {
    "asked to think": (SUM + "<|assistant|><think>", {"temperature": 0.0}),
    "thinks by itself": (SUM + "<|assistant|>", {"temperature": 0.0}),
    "has thought": (SUM + "</think><|assistant|>", {"temperature": 0.0}),
    "sampled": (SUM + "<|assistant|><think>", {}),
    "thinks again and again": (
        SUM, {"temperature": 2.0, "allowed_token_ids": [300, 301, THINK, THOUGHT]},
    ),
    "may not end it": (
        SUM + "<|assistant|><think>", {"temperature": 2.0, "allowed_token_ids": FEW},
    ),
    "through a chain": (
        SUM + "<|assistant|><think>",
        {"chain": chained(dry=DRY, penalty_last_n=8), "frequency_penalty": 0.5},
    ),
    "through mirostat": (
        SUM + "<|assistant|><think>",
        {"chain": chained(mirostat=Mirostat(2, 3.0, 0.2))},
    ),
}  # fmt: skip


def reasoning_lengths(prompt: list[int], output: list[int]) -> list[int]:
    """Return the number of tokens in each reasoning of a response."""
    token_ids, lengths, begin = prompt + output, [], None
    for position, token_id in enumerate(token_ids):
        if token_id == THINK:
            begin = position
        elif token_id == THOUGHT and begin is not None:
            lengths.append(position - begin - 1)
            begin = None
    return lengths if begin is None else [*lengths, len(token_ids) - begin - 1]


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 3, pytest.param(11, marks=pytest.mark.long)])
async def test_reasoning_is_bounded_after_any_cut(
    request: pytest.FixtureRequest, engine: VllmEngine, budget: int
) -> None:
    # Reasoning that begins with the response and takes three tokens ends before the tenth.
    places = range(1, 32) if request.config.getoption("--long") else (*range(1, 10), 17, 31)
    wholes = {}
    for name, (text, changes) in THINKING.items():
        sampling = spec(thinking_budget=budget, ignore_eos=True, **changes)
        case = request_of(Case(sampling=sampling, max_tokens=32), name)
        wholes[name] = replace(case, prompt_token_ids=TOKENIZER.encode(text).ids)
    undisturbed = await run(engine, list(wholes.values()))
    after_cuts = {
        (name, cut): replace(
            whole, id=f"{name} {cut}", output_token_ids=undisturbed[name].token_ids[:cut]
        )
        for name, whole in wholes.items()
        for cut in places
    }

    reported = await run(engine, list(after_cuts.values()))

    for name, whole in wholes.items():
        lengths = reasoning_lengths(whole.prompt_token_ids, undisturbed[name].token_ids)
        assert max(lengths, default=0) <= budget, name
    for (name, cut), each in after_cuts.items():
        rest = undisturbed[name].token_ids[cut:]
        assert (name, cut, reported[each.id].token_ids) == (name, cut, rest)


async def test_reasoning_within_a_grammar_may_end_within_a_character(engine: VllmEngine) -> None:
    """The only character allowed is one of four tokens."""
    prompt = TOKENIZER.encode(SUM + "<|assistant|><think>").ids
    wholes = {}
    for budget in range(1, 7):
        case = Case(
            sampling=greedy(thinking_budget=budget, logit_bias={THOUGHT: -100.0}),
            grammar=f"start: thought <[{THOUGHT}]> /[0-9]{{2}}/\nthought: /😀*/",
        )
        wholes[budget] = replace(request_of(case, f"{budget}"), prompt_token_ids=prompt)
    undisturbed = await run(engine, list(wholes.values()))
    after_cuts = {
        (budget, cut): replace(
            whole,
            id=f"{budget} after {cut}",
            output_token_ids=undisturbed[whole.id].token_ids[:cut],
        )
        for budget, whole in wholes.items()
        for cut in range(1, len(undisturbed[whole.id].token_ids))
    }

    reported = await run(engine, list(after_cuts.values()))

    for budget, whole in wholes.items():
        its = undisturbed[whole.id]
        assert (budget, its.token_ids.index(THOUGHT)) == (budget, budget)
        assert (its.end, len(its.token_ids)) == (SequenceEnd.STOP, budget + 4)
    for (budget, cut), each in after_cuts.items():
        rest = undisturbed[wholes[budget].id].token_ids[cut:]
        assert (budget, cut, reported[each.id].token_ids) == (budget, cut, rest)


async def test_a_budget_ends_with_its_sequence(engine: VllmEngine) -> None:
    """The next sequence in the batch takes its place, and is unbounded."""
    prompt = TOKENIZER.encode(SUM + "<|assistant|><think>").ids
    case = Case(sampling=spec(thinking_budget=8), max_tokens=5)
    bounded = replace(request_of(case, "bounded"), prompt_token_ids=prompt)
    free = request_of(Case(sampling=greedy(ignore_eos=True)), "free")
    alone = (await run(engine, [replace(free, id="alone")]))["alone"].token_ids

    reported = await run(engine, [bounded, free])

    assert THOUGHT not in alone
    assert reported["free"].token_ids == alone


async def test_reasoning_without_a_budget_is_unbounded(engine: VllmEngine) -> None:
    prompt = TOKENIZER.encode(SUM + "<|assistant|><think>").ids
    request = replace(request_of(Case(sampling=greedy()), "free"), prompt_token_ids=prompt)
    output = (await run(engine, [request]))["free"].token_ids
    assert reasoning_lengths(prompt, output)[0] > 20


async def test_bad_word_is_recognised_across_the_cut(engine: VllmEngine) -> None:
    free = (await run(engine, [request_of(CASES["greedy"], "free")]))["free"].token_ids
    at, word = next(
        (at, text)
        for at in range(2, len(free))
        if (text := TOKENIZER.decode(free[at : at + 2])).strip()
        and TOKENIZER.encode(text, add_special_tokens=False).ids == free[at : at + 2]
    )
    case = Case(sampling=greedy(bad_words=[word]))
    undisturbed = (await run(engine, [request_of(case, "bad")]))["bad"].token_ids
    cut = at + 1
    assert undisturbed[:cut] == free[:cut]
    assert undisturbed[cut] != free[cut]

    reported = await run(engine, [request_of(case, "bad after", undisturbed[:cut])])

    assert reported["bad after"].token_ids == undisturbed[cut:]


@pytest.mark.slow
async def test_sequences_left_out_of_steps_equal_the_undisturbed_ones(
    engine: VllmEngine, whole: dict[str, Reported]
) -> None:
    """The steps of requests' prompts leave batch jobs out, which leave and enter the batch."""
    names = ("seeded", "json", "greedy dry", "mirostat 1", "mirostat 2", "mirostat and json")
    jobs = [replace(request_of(CASES[n], f"{n} held"), is_preemptible=True) for n in names]
    reported = {job.id: Reported() for job in jobs}
    for job in jobs:
        await engine.submit([job])
    prompts = 0
    while any(each.end is None for each in reported.values()):
        outputs = (await engine.step()).outputs
        for output in outputs:
            reported[output.sequence_id].add(output)
        # A step without a prompt, after which the next one leaves out what it reported.
        if any(output.sequence_id in (job.id for job in jobs) for output in outputs):
            prompts += 1
            prompt = request_of(Case(sampling=greedy(), max_tokens=1), f"prompt {prompts}")
            reported[prompt.id] = Reported()
            await engine.submit([prompt])

    for name, job in zip(names, jobs, strict=True):
        assert (name, reported[job.id].token_ids) == (name, whole[name].token_ids)


async def test_each_sequence_of_a_job_resumes_where_it_was(engine: VllmEngine) -> None:
    for name in ("truncated", "mirostat 2"):
        firsts = [replace(request_of(CASES[name], f"{name} {i}"), seed=1234 + i) for i in range(4)]
        undisturbed = await run(engine, firsts)
        rest = [
            replace(
                request_of(
                    CASES[name],
                    f"{name} {i} continues",
                    undisturbed[f"{name} {i}"].token_ids[: 3 * i],
                ),
                seed=1234 + i,
            )
            for i in range(4)
        ]
        reported = {request.id: Reported() for request in rest}

        await engine.submit(rest)
        await follow(engine, reported)

        for i in range(4):
            expected = undisturbed[f"{name} {i}"].token_ids[3 * i :]
            assert reported[f"{name} {i} continues"].token_ids == expected


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([-1], "ids between 0 and 2047"),
        ([2048], "ids between 0 and 2047"),
        ([500] * 40, r"less than max_tokens \(40\)"),
    ],
    ids=["negative", "outside the vocabulary", "complete"],
)
async def test_invalid_earlier_tokens_are_refused(
    engine: VllmEngine, output: list[int], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await engine.submit([request_of(CASES["greedy"], f"refused {output[:2]}", output)])


async def test_earlier_tokens_must_fit_the_window(engine: VllmEngine) -> None:
    case = Case(sampling=greedy(), max_tokens=2000)
    request = request_of(case, "too long", [500] * (CONTEXT_WINDOW - len(PROMPT)))
    with pytest.raises(InvalidRequestError, match=f"less than {CONTEXT_WINDOW} with the prompt"):
        await engine.submit([request])


async def test_earlier_tokens_that_a_grammar_forbids_end_only_their_sequence(
    engine: VllmEngine, whole: dict[str, Reported]
) -> None:
    wrong = request_of(CASES["json"], "wrong", [500])
    right = request_of(CASES["json"], "right", whole["json"].token_ids[:5])

    reported = await run(engine, [wrong, right])

    assert (reported["wrong"].token_ids, reported["wrong"].end) == ([], SequenceEnd.ERROR)
    assert reported["right"].token_ids == whole["json"].token_ids[5:]


async def test_replay_repeats_the_output_tokens_whatever_would_be_sampled(
    engine: VllmEngine, whole: dict[str, Reported]
) -> None:
    earlier = whole["greedy"].token_ids[20:5:-1]
    mirostat = CASES["mirostat 2"]
    unseeded = msgspec.structs.replace(mirostat.sampling, is_seed_requested=False, ignore_eos=True)
    case = replace(mirostat, sampling=unseeded)
    looks = Case(sampling=greedy(), max_tokens=1, logprobs=2)
    requests = [
        request_of(case, "replayed", earlier),
        replace(request_of(looks, "looked at"), prompt_token_ids=PROMPT + earlier),
    ]

    reported = await run(engine, requests)

    # The alternatives are the model's: they depend on earlier tokens, not on the sampled one.
    first, expected = (dict(reported[each.id].logprobs[0][1:]) for each in requests)
    assert first == pytest.approx(expected, abs=1e-4)
    assert len(reported["replayed"].token_ids) == case.max_tokens - len(earlier)


async def test_sequence_aborted_during_replay_is_dropped(
    engine: VllmEngine, whole: dict[str, Reported]
) -> None:
    tokens = whole["mirostat 2"].token_ids
    await engine.submit([request_of(CASES["mirostat 2"], "aborted", tokens[:30])])
    await engine.step()
    await engine.abort(["aborted"])
    assert not engine._resumed._begun

    another = request_of(CASES["mirostat 2"], "another", tokens[:30])
    reported = await run(engine, [another], aborted="aborted")
    assert reported["another"].token_ids == tokens[30:]
    assert not engine._resumed._begun


async def test_greedy_chain_replays_nothing(engine: VllmEngine, whole: dict[str, Reported]) -> None:
    sampling = msgspec.structs.replace(CASES["mirostat 2"].sampling, temperature=0.0)
    tokens = whole["greedy"].token_ids
    request = request_of(Case(sampling=sampling), "greedy mirostat", tokens[:9])
    await engine.submit([request])
    assert engine._resumed._begun["greedy mirostat"].replayed_tokens == 0
    reported = {"greedy mirostat": Reported()}
    await follow(engine, reported)
    assert reported["greedy mirostat"].token_ids == tokens[9:]
