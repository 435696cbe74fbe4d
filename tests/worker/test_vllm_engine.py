"""The real engine on a CPU, compared with `AsyncLLM.generate`, and hostile requests."""

import asyncio
import math
import re
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace
from tokenizers import Tokenizer

from contract.messages import Feature, GenerationJob, decode_logprobs
from contract.sampling import (
    DEFAULT_SAMPLERS,
    Dry,
    Mirostat,
    RepetitionDetection,
    SamplerChain,
    SamplingSpec,
    Xtc,
)
from tests.worker.conftest import MODEL_FOLDER, make_job
from tests.worker.real_engine import (
    CONTEXT_WINDOW,
    EOS,
    EXACT,
    MARKS,
    EngineSlot,
    Held,
    Results,
    generation_of,
    read_cache,
    run_jobs,
)
from worker.chat_format import folder_special_tokens, folder_templates
from worker.engine.base import EngineRequest, InvalidRequestError, SequenceEnd, SequenceOutput
from worker.engine.vllm.engine import VllmEngine
from worker.engine.vllm.plugin import prepare_waits

pytestmark = MARKS

TOKENIZER = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
SPECIAL = {token.content for token in TOKENIZER.get_added_tokens_decoder().values()}


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(engine_slot: EngineSlot) -> VllmEngine:
    return await engine_slot.engine(**EXACT)


DEF = ids_of('def read(self, size):\n    """')
PARSE = ids_of('def parse(text):\n    """Parse')
LICENSE = ids_of("This License ")
ACCENTS = ids_of("naïve 日本語 é")

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0.0}, {}),
    "seeded": ({}, {}),
    "hottest": ({"temperature": 2.0}, {}),
    "cool": ({"temperature": 0.7}, {}),
    "top_p": ({"top_p": 0.8}, {}),
    "top_p_zero": ({"top_p": 0.0}, {}),
    "top_k": ({"top_k": 20}, {}),
    "min_p": ({"min_p": 0.05}, {}),
    "all_truncations": ({"temperature": 1.3, "top_p": 0.9, "top_k": 50, "min_p": 0.02}, {}),
    "presence_penalty": ({"presence_penalty": 1.0}, {}),
    "frequency_penalty": ({"frequency_penalty": 1.0, "temperature": 0.0}, {}),
    "repetition_penalty": ({"repetition_penalty": 1.2, "temperature": 0.0}, {}),
    "logit_bias": ({"logit_bias": {500: 100.0}, "temperature": 0.0}, {}),
    "ignore_eos": ({"repetition_penalty": 1.2, "temperature": 0.0, "ignore_eos": True}, {}),
    "stop": ({"temperature": 0.0}, {"stop": ["the", "of the"]}),
    "stop_seeded": ({}, {"stop": ["\n", "e a"]}),
    "logprobs": ({}, {"logprobs": 3}),
    "logprobs_zero": ({"temperature": 0.0}, {"logprobs": 0}),
    "prompt_logprobs": (
        {"temperature": 0.0},
        {"logprobs": 2, "score_prompt": True},
    ),
    "many": ({}, {"n": 3}),
    "min_tokens": ({"temperature": 0.0, "min_tokens": 30, "logit_bias": {EOS: 4.0}}, {}),
    "stop_token_ids": ({"stop_token_ids": list(range(300, 420))}, {}),
    "stop_token_included": (
        {"stop_token_ids": list(range(300, 420))},
        {"includes_stop": True, "stop": ["qqq"]},
    ),
    "stop_included": ({"temperature": 0.0}, {"stop": ["the", "of the"], "includes_stop": True}),
    "stop_after_min_tokens": (
        {"temperature": 0.0, "min_tokens": 12},
        {"stop": ["e", "he", "\n"], "includes_stop": True},
    ),
    "stops_of_all_lengths": (
        {},
        {"stop": ["qzx" * 9, "turn the", "t", "n t", *map(str, range(60))]},
    ),
    "allowed_token_ids": ({"allowed_token_ids": list(range(300, 340))}, {}),
    "bad_words": ({"temperature": 0.0, "bad_words": ["the", " read", "and", "License"]}, {}),
    "forbidden": ({"logit_bias": dict.fromkeys(range(260, 1284), -math.inf)}, {}),
    "repetition": (
        {
            "temperature": 0.0,
            "logit_bias": {500: 100.0},
            "repetition_detection": RepetitionDetection(4, 1, 6),
        },
        {},
    ),
    "special_tokens": ({"logit_bias": {0: 9.0}}, {"shows_special_tokens": True}),
    "grammar": ({}, {"grammar": "start: /[a-f]{3}-[0-9]{2}( [a-z]+)?/"}),
    "logprobs_20": ({}, {"logprobs": 20}),
    "without_cache": ({}, {"reads_prefix_cache": False}),
}
PROMPTS = {"def": DEF, "parse": PARSE, "license": LICENSE, "accents": ACCENTS}


@dataclass
class Both:
    """The same jobs through the worker's parts and through `AsyncLLM.generate`."""

    names: list[str]
    jobs: list[GenerationJob]
    ours: Results
    theirs: list[list[Any]]


def all_jobs() -> tuple[list[str], list[GenerationJob]]:
    names, jobs = [], []
    for case, (sampling, fields) in CASES.items():
        for prompt, ids in PROMPTS.items():
            names.append(f"{case}-{prompt}")
            # So hot that even a confident small model gives varied tokens.
            spec = SamplingSpec(seed=1234, **{"temperature": 1.6, **sampling})
            jobs.append(make_job(prompt_token_ids=ids, max_tokens=48, sampling=spec, **fields))
    return names, jobs


async def generate(engine: VllmEngine, job: GenerationJob) -> list[Any]:
    """Return vLLM's own outputs for each choice of a job."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import (
        RepetitionDetectionParams,
        RequestOutputKind,
        StructuredOutputsParams,
    )

    spec = job.sampling
    repetition = spec.repetition_detection
    params = SamplingParams(
        n=job.n,
        temperature=spec.temperature,
        top_p=max(spec.top_p, 1e-6),
        top_k=spec.top_k,
        min_p=spec.min_p,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        repetition_penalty=spec.repetition_penalty,
        logit_bias=spec.logit_bias or None,
        ignore_eos=spec.ignore_eos,
        seed=spec.seed,
        max_tokens=job.max_tokens,
        stop=job.stop,
        min_tokens=spec.min_tokens,
        stop_token_ids=spec.stop_token_ids,
        include_stop_str_in_output=job.includes_stop,
        allowed_token_ids=spec.allowed_token_ids or None,
        bad_words=spec.bad_words,
        repetition_detection=repetition
        and RepetitionDetectionParams(
            repetition.max_pattern_size, repetition.min_pattern_size, repetition.min_count
        ),
        skip_special_tokens=not job.shows_special_tokens,
        structured_outputs=StructuredOutputsParams(grammar=job.grammar) if job.grammar else None,
        skip_reading_prefix_cache=not job.reads_prefix_cache or job.score_prompt,
        logprobs=job.logprobs,
        prompt_logprobs=job.logprobs if job.score_prompt else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompt = tokens_input(job.prompt_token_ids.tolist(), cache_salt="theirs")
    outputs = [each async for each in engine._llm.generate(prompt, params, request_id=job.id)]
    final = outputs[-1]
    return [final, *sorted(final.outputs, key=lambda output: output.index)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def both(engine: VllmEngine) -> Both:
    names, jobs = all_jobs()
    ours = await run_jobs(engine, jobs)
    theirs = await asyncio.gather(*[generate(engine, job) for job in jobs])
    # generate() started vLLM's reader of outputs; from here on the worker reads them again.
    engine._llm.output_handler.cancel()
    await asyncio.gather(engine._llm.output_handler, return_exceptions=True)
    engine._llm.output_handler = None
    return Both(names, jobs, ours, theirs)


async def test_tokens_and_text_equal_vllms_own(both: Both) -> None:
    different = []
    for index, (name, job) in enumerate(zip(both.names, both.jobs, strict=True)):
        for choice in range(job.n):
            output = both.theirs[index][1 + choice]
            repeats = output.finish_reason == "repetition"
            expected = (
                list(output.token_ids),
                output.text,
                "stop" if repeats else output.finish_reason,
            )
            stop_reason = "repetition" if repeats else output.stop_reason
            last = [d for d in both.ours.outboxes[index].deltas if d.choice == choice][-1]
            got = (
                both.ours.token_ids(index, choice),
                both.ours.text(index, choice),
                str(last.finish_reason),
            )
            if got != expected or last.stop_reason != stop_reason:
                different.append((name, choice, got, expected))
    assert not different
    assert len(both.jobs) == len(CASES) * len(PROMPTS)


async def test_contract_cases_cover_their_purpose(both: Both) -> None:
    outputs = [output for each in both.theirs for output in each[1:]]
    ends = {(output.finish_reason, type(output.stop_reason)) for output in outputs}
    assert ends == {
        ("length", type(None)),
        ("stop", type(None)),
        ("stop", str),
        ("stop", int),
        ("repetition", str),
    }
    texts = {both.ours.text(index) for index in range(len(both.jobs))}
    assert len(texts) > len(both.jobs) // 3


async def test_logprobs_equal_vllms_own(both: Both) -> None:
    compared = 0
    for index, job in enumerate(both.jobs):
        if job.logprobs is None:
            continue
        output = both.theirs[index][1]
        entries = both.ours.logprobs(index)
        assert len(entries) == len(output.token_ids) == len(output.logprobs)
        for entry, token_id, theirs in zip(entries, output.token_ids, output.logprobs, strict=True):
            assert entry.logprob == pytest.approx(theirs[token_id].logprob, abs=1e-6)
            best = max(value.logprob for value in theirs.values())
            assert entry.top is not None
            assert entry.top[0][1] == pytest.approx(best, abs=1e-6)
            compared += 1
        text = both.ours.text(index)
        assert all(text[e.offset :].startswith(e.token) or e.token in SPECIAL for e in entries)
    assert compared > 100


async def test_prompt_logprobs_equal_vllms_own(both: Both) -> None:
    compared = 0
    for index, job in enumerate(both.jobs):
        if not job.score_prompt:
            continue
        (scored,) = both.ours.outboxes[index].prompts
        theirs = both.theirs[index][0].prompt_logprobs
        ours = decode_logprobs(*scored.logprobs)
        assert len(ours) == len(theirs) == len(job.prompt_token_ids)
        assert ours[0].logprob is None
        for entry, values, token_id in zip(
            ours[1:], theirs[1:], job.prompt_token_ids[1:], strict=True
        ):
            assert entry.logprob == pytest.approx(values[token_id].logprob, abs=1e-6)
            assert entry.rank == values[token_id].rank
            assert {*entry.top_ids} == values.keys()
            compared += 1
    assert compared == sum(len(ids) - 1 for ids in PROMPTS.values())


async def test_prompt_inside_a_character_leaks_nothing(engine: VllmEngine) -> None:
    first, *rest = ids_of("日")
    spec = SamplingSpec(seed=1, temperature=0.0, logit_bias={rest[0]: 100.0})
    job = make_job(prompt_token_ids=[*DEF, first], max_tokens=len(rest), sampling=spec)
    results = await run_jobs(engine, [job])
    assert not set("defread") & set(results.text(0))


async def test_max_tokens_zero_scores_the_prompt(engine: VllmEngine) -> None:
    job = make_job(prompt_token_ids=DEF, max_tokens=0, score_prompt=True, logprobs=1)
    results = await run_jobs(engine, [job])
    (finished,) = results.outboxes[0].finished
    assert (finished.prompt_tokens, finished.completion_tokens) == (len(DEF), 0)
    assert len(decode_logprobs(*results.outboxes[0].prompts[0].logprobs)) == len(DEF)


async def test_best_of_ranks_by_the_engines_logprobs(engine: VllmEngine) -> None:
    job = make_job(prompt_token_ids=DEF, max_tokens=12, n=2, best_of=6, logprobs=0, seed=3)
    results = await run_jobs(engine, [job])
    means = []
    for choice in results.outboxes[0].finished[0].chosen:
        deltas = [d for d in results.outboxes[0].deltas if d.choice == choice]
        entries = [entry for delta in deltas for entry in decode_logprobs(delta.logprobs)]
        means.append(sum(entry.logprob or 0.0 for entry in entries) / len(entries))
    everyone = sorted((s.mean_logprob for s in results.generations[0].sequences), reverse=True)
    assert means == pytest.approx(everyone[:2])
    assert results.outboxes[0].finished[0].completion_tokens == sum(
        sequence.tokens for sequence in results.generations[0].sequences
    )


async def test_cached_prompt_tokens_are_reported_and_salted(engine: VllmEngine) -> None:
    prompt = [300 + index % 700 for index in range(400)]

    async def cached(salt: str) -> int:
        job = make_job(prompt_token_ids=prompt, max_tokens=1, cache_salt=salt)
        results = await run_jobs(engine, [job])
        return results.outboxes[0].finished[0].cached_tokens

    assert await cached("a") == 0
    assert await cached("a") >= 128
    assert await cached("b") == 0


async def test_64_sequences_run_at_once(engine: VllmEngine) -> None:
    jobs = [make_job(prompt_token_ids=[300 + i, *DEF], max_tokens=40, seed=i) for i in range(64)]
    results = await run_jobs(engine, jobs)
    assert max(stats.running for stats in results.stats) == 64
    for index in range(64):
        assert results.outboxes[index].finished[0].completion_tokens > 0


async def test_abort_frees_the_engine_within_one_step(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SamplingSpec(seed=1, ignore_eos=True)
    jobs = [make_job(prompt_token_ids=DEF, max_tokens=900, sampling=spec, n=4)]
    requests = generation_of(engine, jobs[0]).requests()
    await engine.submit(requests)
    for _ in range(5):
        step = await engine.step()
    assert step.stats is not None
    assert step.stats.running == 4
    core, ends = engine._llm.engine_core, list[float]()
    get_output = core.get_output_async

    async def get_and_note() -> Any:
        outputs = await get_output()
        if outputs.scheduler_stats is not None:
            ends.append(outputs.timestamp)
        return outputs

    monkeypatch.setattr(core, "get_output_async", get_and_note)
    await engine.abort([request.id for request in requests])
    aborted = time.monotonic()
    later = await run_jobs(engine, [make_job(prompt_token_ids=LICENSE, max_tokens=30, seed=5)])
    running = [stats.running for stats in later.stats]
    freed = next(step for step, count in enumerate(running) if count < 4)
    # Outputs of steps before the abort may be unread, more of them on a busy machine.
    late = [end for end in ends[:freed] if end > aborted]
    assert len(late) <= 4, running
    assert max(running[freed:]) == 1, running
    assert running[-1] == 0


_numbers = count(1)


def raw(**changes: Any) -> EngineRequest:
    """A request that skips the worker's checks."""
    fields: dict[str, Any] = {
        "id": f"raw-{next(_numbers)}",
        "prompt_token_ids": DEF,
        "max_tokens": 4,
        "sampling": SamplingSpec(seed=1),
        "seed": 1,
        "cache_salt": "salt",
    }
    return EngineRequest(**{**fields, **changes})


def spec(**changes: Any) -> SamplingSpec:
    return SamplingSpec(seed=1, **changes)


KILLERS: dict[str, dict[str, Any]] = {
    "empty prompt": {"prompt_token_ids": []},
    "token id out of range": {"prompt_token_ids": [5, 10**6]},
    "huge token id": {"prompt_token_ids": [2**32 - 1]},
    "prompt as long as the window": {"prompt_token_ids": [300] * CONTEXT_WINDOW},
    "prompt longer than the window": {"prompt_token_ids": [300] * (CONTEXT_WINDOW + 1)},
    "window overrun by max_tokens": {"prompt_token_ids": [300] * 1000, "max_tokens": 500},
    "max_tokens zero": {"max_tokens": 0},
    "temperature nan": {"sampling": spec(temperature=float("nan"))},
    "temperature above 2": {"sampling": spec(temperature=1e9)},
    "tiny temperature": {"sampling": spec(temperature=1e-30)},
    "top_p nan": {"sampling": spec(top_p=float("nan"))},
    "top_p zero": {"sampling": spec(top_p=0.0)},
    "top_k larger than the vocabulary": {"sampling": spec(top_k=2**31 - 1)},
    "top_k -1": {"sampling": spec(top_k=-1)},
    "min_p one": {"sampling": spec(min_p=1.0)},
    "penalties at their ends": {
        "sampling": spec(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=0.01)
    },
    "logit_bias out of range": {"sampling": spec(logit_bias={10**6: 1.0})},
    "logit_bias negative id": {"sampling": spec(logit_bias={-1: 1.0})},
    "logit_bias bans nearly all": {"sampling": spec(logit_bias=dict.fromkeys(range(1024), -100.0))},
    "seed at its largest": {"seed": 2**63 - 1},
    "seed too large": {"seed": 2**64},
    "logprobs above the engine's most": {"logprobs": 10_000},
    "prompt_logprobs with a long prompt": {"prompt_token_ids": [300] * 900, "prompt_logprobs": 5},
    "odd cache salt": {"cache_salt": "@/\\ü" * 100},
    "all tokens forbidden": {
        "sampling": spec(allowed_token_ids=[300], logit_bias={300: -math.inf})
    },
    "all tokens forbidden, greedy": {
        "sampling": spec(temperature=0.0, allowed_token_ids=[300], logit_bias={300: -math.inf})
    },
    "all tokens forbidden by bad words": {
        "sampling": spec(allowed_token_ids=ids_of(" the"), bad_words=["the"])
    },
    "only the end, which may not come": {
        "sampling": spec(allowed_token_ids=[EOS], min_tokens=4),
    },
    "bias not a number": {"sampling": spec(logit_bias={300: math.nan})},
    "bias infinite": {"sampling": spec(logit_bias={300: math.inf})},
    "min_tokens above max_tokens": {"sampling": spec(min_tokens=2**31 - 1)},
    "min_tokens huge": {"sampling": spec(min_tokens=2**80)},
    "min_tokens negative": {"sampling": spec(min_tokens=-1)},
    "stop token out of range": {"sampling": spec(stop_token_ids=[10**6])},
    "stop token negative": {"sampling": spec(stop_token_ids=[-1])},
    "stop token huge": {"sampling": spec(stop_token_ids=[2**70])},
    "stop tokens without number": {
        "sampling": spec(stop_token_ids=list(range(2048)), min_tokens=3)
    },
    "allowed token out of range": {"sampling": spec(allowed_token_ids=[10**6])},
    "allowed token negative": {"sampling": spec(allowed_token_ids=[-5])},
    "bad word empty": {"sampling": spec(bad_words=[""])},
    "bad word blank": {"sampling": spec(bad_words=["   "])},
    "bad word special": {"sampling": spec(bad_words=["</s>", "<s>"])},
    "bad word odd": {"sampling": spec(bad_words=["\x00", "\ud7ff", "日本", "a" * 5000])},
    "bad words beyond number": {"sampling": spec(bad_words=[f"w{i}" for i in range(3000)])},
    "repetition negative": {"sampling": spec(repetition_detection=RepetitionDetection(-1, -1, -1))},
    "repetition huge": {
        "sampling": spec(repetition_detection=RepetitionDetection(2**31, 1, 2**31))
    },
    "grammar that is none": {"grammar": "start: ("},
    "grammar of nothing": {"grammar": " "},
    "grammar without end": {"grammar": "start: start"},
    "grammar and all forbidden": {
        "grammar": 'start: "zz"',
        "sampling": spec(allowed_token_ids=[300]),
    },
    "grammar and min_tokens": {"grammar": 'start: "a"', "sampling": spec(min_tokens=4)},
    "grammar and no end": {"grammar": 'start: "a"', "sampling": spec(ignore_eos=True)},
    "grammar and stop tokens": {
        "grammar": "start: /[a-z]+/",
        "sampling": spec(stop_token_ids=list(range(260, 380)), min_tokens=2),
    },
    "grammar and forbidden end": {
        "grammar": 'start: "a"',
        "sampling": spec(logit_bias={EOS: -math.inf}),
    },
    "image for a model without eyes": {"images": [b"x"]},
    "chain not a number": {"sampling": spec(chain=SamplerChain(order=[], typical_p=math.nan))},
    "chain huge": {"sampling": spec(chain=SamplerChain(order=[], min_keep=2**70))},
    "chain with everything at its end": {
        "sampling": spec(
            temperature=2.0,
            top_k=1,
            min_p=1.0,
            chain=SamplerChain(
                order=list(DEFAULT_SAMPLERS) * 3,
                typical_p=0.0,
                top_n_sigma=0.0,
                dynatemp_range=2.0,
                dynatemp_exponent=100.0,
                xtc=Xtc(1.0, 0.0),
                dry=Dry(1000.0, 1000.0, 0, -1, ["", "\n", "a" * 40]),
            ),
        )
    },
    "chain on forbidden tokens": {
        "sampling": spec(
            allowed_token_ids=[300],
            logit_bias={300: -math.inf},
            chain=SamplerChain(order=list(DEFAULT_SAMPLERS), mirostat=Mirostat(1, 0.0, 10.0)),
        )
    },
}


async def test_no_request_kills_the_engine(engine: VllmEngine) -> None:
    streams = [make_job(prompt_token_ids=DEF, max_tokens=200, seed=i) for i in range(8)]
    alone = await run_jobs(engine, streams)
    begun = asyncio.Event()
    running = asyncio.create_task(run_jobs(engine, streams, begun=begun))
    await begun.wait()
    refused = {}
    for name, changes in KILLERS.items():
        try:
            await engine.submit([raw(id=f"killer {name}", **changes)])
        except InvalidRequestError as error:
            refused[name] = str(error)
        await asyncio.sleep(0)
    together = await running
    for index in range(8):
        assert together.token_ids(index) == alone.token_ids(index)
    after = await run_jobs(engine, [make_job(prompt_token_ids=DEF, max_tokens=4)])
    assert after.outboxes[0].finished
    must_be_refused = {
        "empty prompt",
        "token id out of range",
        "temperature nan",
        "seed too large",
        "stop token out of range",
        "min_tokens negative",
        "bad word empty",
        "bad words beyond number",
        "repetition negative",
        "image for a model without eyes",
        "chain not a number",
    }
    assert must_be_refused - set(refused) == set()
    assert not any(str(MODEL_FOLDER) in message for message in refused.values())


async def _step_until_it_fails(engine: VllmEngine) -> None:
    while True:
        await engine.step()


async def test_message_that_cannot_be_read_is_not_the_death_of_the_engine(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = engine._llm.engine_core.resources.output_queue_task
    receiver = task.get_coro().cr_frame.f_locals["self"]
    decode, errors = receiver._decode, [ValueError("not a message")]

    def decode_or_fail(frames: Any) -> Any:
        if errors:
            raise errors.pop()
        return decode(frames)

    monkeypatch.setattr(receiver, "_decode", decode_or_fail)
    lost = raw(id="lost", max_tokens=500, sampling=spec(ignore_eos=True))
    await engine.submit([lost])
    with pytest.raises(ValueError, match="not a message"):
        await _step_until_it_fails(engine)
    await engine.abort([lost.id])
    after = await run_jobs(engine, [make_job(prompt_token_ids=DEF, max_tokens=4)])
    assert after.outboxes[0].finished


AMBIGUOUS = """%llguidance {"no_forcing": true}
start: e
e: e e e | e e | "a" | "b" | ""
"""


@dataclass
class Beside:
    """Results of a request next to an endless one."""

    outputs: list[SequenceOutput]
    waits: list[int]
    """For each token of the endless one: engine steps with outputs since its last token."""


RUNS = count()


async def run_endless(engine: VllmEngine, request: EngineRequest) -> Beside:
    """Run a request next to an endless one, which must continue for ten steps after its end."""
    # Outputs of a sequence may arrive after it was aborted, so each run uses an id of its own.
    other = raw(id=f"endless-{next(RUNS)}", max_tokens=900, sampling=spec(ignore_eos=True))
    await engine.submit([other])
    while not any(each.sequence_id == other.id for each in (await engine.step()).outputs):
        pass
    await engine.submit([request])
    beside = Beside([], [])
    steps, left = 0, 10
    while left:
        outputs = [
            each
            for each in (await engine.step()).outputs
            if each.sequence_id in (request.id, other.id)
        ]
        beside.outputs += [each for each in outputs if each.sequence_id == request.id]
        steps += bool(outputs)
        has_other = any(each.sequence_id == other.id for each in outputs)
        if has_other:
            beside.waits.append(steps)
            steps = 0
        assert not any(each.end for each in outputs if each.sequence_id == other.id)
        left -= has_other and bool(beside.outputs) and beside.outputs[-1].end is not None
    await engine.abort([other.id])
    return beside


async def test_grammar_that_becomes_too_complex_ends_only_its_job(engine: VllmEngine) -> None:
    no_end = spec(logit_bias={EOS: -100.0}, temperature=2.0)
    request = raw(id="ambiguous", grammar=AMBIGUOUS, sampling=no_end, max_tokens=900)
    beside = await run_endless(engine, request)
    outputs = beside.outputs
    assert 20 < len(outputs) < 300
    assert outputs[-1].end is SequenceEnd.ERROR
    assert {each.end for each in outputs[:-1]} == {None}
    assert beside.waits == [1] * len(beside.waits)
    # A step's work grows with the text. Some hundred characters of any kind reach the limit; four
    # times the limit would allow four times as many, in ever longer steps.
    text = TOKENIZER.decode([token_id for each in outputs for token_id in each.token_ids])
    assert len(text) < 120


TOO_LARGE = """%llguidance {}
start: A
A: /(.*[abc].{30}){5}/ & /(.*x.{40}){9}/ & ~/(.*x.{10}){3}/
"""


@pytest.mark.parametrize(
    "grammar",
    ['%llguidance {}\nstart: "aa"', TOO_LARGE, "start: ("],
    ids=["nothing is left", "too large", "no grammar"],
)
async def test_grammar_that_cannot_continue_ends_only_its_job(
    engine: VllmEngine, grammar: str
) -> None:
    allowed = spec(allowed_token_ids=ids_of("z"))
    request = raw(id="stuck", grammar=grammar, sampling=allowed, max_tokens=900)
    beside = await run_endless(engine, request)
    assert beside.outputs[-1].end is SequenceEnd.ERROR


SLOW = 'start: (w " ")*\nw: ' + " | ".join(f"/[a-z]{{1,{n}}}x{n}/" for n in range(1, 301))
"""A grammar whose mask takes milliseconds."""


@pytest.mark.slow
async def test_slow_masks_of_a_tenant_share_steps_and_another_tenant_is_in_each(
    engine: VllmEngine,
) -> None:
    other = raw(id="other", max_tokens=20, sampling=spec(ignore_eos=True), cache_salt="other")
    no_end = spec(logit_bias={EOS: -100.0})
    many = [raw(id=f"slow-{n}", grammar=SLOW, sampling=no_end, max_tokens=8) for n in range(40)]
    for request in (other, *many):
        await engine.submit([request])
    left = mine = {other.id, *(each.id for each in many)}
    sizes, waits, steps = [], [], 0
    while left:
        # A sequence that an earlier test aborted may have one more output.
        outputs = [each for each in (await engine.step()).outputs if each.sequence_id in mine]
        ids = {each.sequence_id for each in outputs}
        sizes.append(len(ids - {other.id}))
        steps += bool(ids)
        if other.id in ids:
            waits.append(steps)
            steps = 0
        assert {each.end for each in outputs} <= {None, SequenceEnd.LENGTH}
        left = left - {each.sequence_id for each in outputs if each.end}
    assert sum(sizes) == 8 * len(many)
    # Without a bound, a step would fill the masks of all.
    assert max(sizes) <= len(many) / 2
    assert waits[1:] == [1] * 19


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_bad_words_are_excluded_with_and_without_a_space(
    engine: VllmEngine, temperature: float
) -> None:
    prompt = ids_of("The quick brown fox")
    plain = make_job(prompt_token_ids=prompt, sampling=spec(temperature=0.0), max_tokens=3)
    assert " jumps" in (await run_jobs(engine, [plain])).text(0)
    without = spec(temperature=temperature, bad_words=["jumps"])
    job = make_job(prompt_token_ids=prompt, sampling=without, max_tokens=8, n=16)
    results = await run_jobs(engine, [job])
    texts = [results.text(0, choice) for choice in range(16 if temperature else 1)]
    assert all(texts)
    assert not any("jumps" in text for text in texts)


THE = TOKENIZER.token_to_id("Ġthe")
DIGIT = ids_of("1")
CHAIN = SamplerChain(order=list(DEFAULT_SAMPLERS))
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "truncated": {"top_k": 5, "top_p": 0.5, "min_p": 0.1},
    "penalties": {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    "chain": {"chain": replace(CHAIN, typical_p=0.5, top_n_sigma=1.0, xtc=Xtc(0.5, 0.1))},
    "greedy chain": {"chain": CHAIN, "temperature": 0.0},
    "mirostat": {"chain": replace(CHAIN, mirostat=Mirostat(2, 5.0, 0.1))},
}
NOTHING_LEFT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "bad word": ({"allowed_token_ids": [THE], "bad_words": ["the"]}, ["allowed_", "bad_words"]),
    "bias": (
        {"allowed_token_ids": [THE], "logit_bias": {THE: -math.inf}},
        ["allowed_", "logit_bias"],
    ),
    "end of text": ({"allowed_token_ids": [EOS], "min_tokens": 2}, ["allowed_", "min_tokens"]),
    "stop": (
        {"allowed_token_ids": [THE], "min_tokens": 2, "stop_token_ids": [THE]},
        ["allowed_", "min_tokens"],
    ),
    "all": (
        {
            "allowed_token_ids": [THE, EOS, 500],
            "min_tokens": 1,
            "logit_bias": {500: -math.inf},
            "bad_words": ["the"],
        },
        ["allowed_", "bad_words", "logit_bias", "min_tokens"],
    ),
}


@pytest.mark.parametrize(("changes", "names"), NOTHING_LEFT.values(), ids=NOTHING_LEFT)
async def test_request_that_leaves_no_first_token_is_refused(
    engine: VllmEngine, changes: dict[str, Any], names: list[str]
) -> None:
    for sampled in SAMPLED.values():
        with pytest.raises(InvalidRequestError, match=".* and '".join(names)) as refused:
            await engine.submit([raw(sampling=spec(**sampled, **changes))])
        assert refused.value.param == "allowed_token_ids"


@pytest.mark.parametrize("sampled", SAMPLED.values(), ids=SAMPLED)
async def test_sequence_to_which_no_token_is_left_ends(
    engine: VllmEngine, sampled: dict[str, Any]
) -> None:
    bans = spec(**sampled, allowed_token_ids=DIGIT, bad_words=["11111"])
    for output in ([], DIGIT * 3):
        request = raw(sampling=bans, max_tokens=9, logprobs=2, output_token_ids=output)
        await engine.submit([request])
        outputs = list[SequenceOutput]()
        while not outputs or outputs[-1].end is None:
            outputs += [e for e in (await engine.step()).outputs if e.sequence_id == request.id]
        await engine.abort([request.id])
        assert outputs[-1].end is SequenceEnd.STUCK
        tokens = [token for each in outputs for token in each.token_ids]
        assert output + tokens == DIGIT * 4


@pytest.mark.parametrize("sampled", SAMPLED.values(), ids=SAMPLED)
async def test_last_token_that_is_left_is_sampled(
    engine: VllmEngine, sampled: dict[str, Any]
) -> None:
    for changes in (
        {"allowed_token_ids": [THE, 500], "bad_words": ["the"]},
        {"allowed_token_ids": [500]},
        {"allowed_token_ids": [EOS, 500, THE], "min_tokens": 9, "logit_bias": {THE: -math.inf}},
    ):
        job = make_job(sampling=spec(**sampled, **changes), max_tokens=5, n=2)
        results = await run_jobs(engine, [job])
        assert results.token_ids(0, 0) == [500] * 5


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [10, pytest.param(48, marks=pytest.mark.long)])
async def test_many_long_seeded_prompts_at_once(engine: VllmEngine, prompts: int) -> None:
    """Seeded prompts that share a step's budget kill an engine that splits prompts on a CPU."""
    jobs = [
        make_job(prompt_token_ids=[300 + i] * 900, max_tokens=3, seed=i, cache_salt=str(i))
        for i in range(prompts)
    ]
    results = await run_jobs(engine, jobs)
    assert all(box.finished for box in results.outboxes)
    (one,) = (await run_jobs(engine, jobs[:1])).outboxes
    assert one.finished
    assert results.token_ids(0) == [each for d in one.deltas for each in d.token_ids]


async def test_grammar_chain_and_several_choices_work_together(engine: VllmEngine) -> None:
    chain = SamplerChain(order=list(DEFAULT_SAMPLERS), xtc=Xtc(0.5, 0.1))
    job = make_job(
        prompt_token_ids=DEF,
        max_tokens=40,
        n=8,
        sampling=SamplingSpec(seed=1, temperature=1.5, chain=chain),
        grammar="start: /[0-9]{3}-[a-z]{2}/",
    )
    results = await run_jobs(engine, [job])
    texts = [results.text(0, choice) for choice in range(8)]
    assert all(re.fullmatch("[0-9]{3}-[a-z]{2}", text) for text in texts)
    assert len(set(texts)) > 1
    again = await run_jobs(engine, [make_job(**{**vars_of(job), "id": "again"})])
    assert [again.text(0, choice) for choice in range(8)] == texts


def vars_of(job: GenerationJob) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.__struct_fields__}


async def test_prefix_cache_is_not_read_if_the_job_forbids_it(engine: VllmEngine) -> None:
    prompt = [310 + index % 700 for index in range(400)]

    async def cached(*, reads: bool) -> int:
        job = make_job(
            prompt_token_ids=prompt, max_tokens=1, cache_salt="c", reads_prefix_cache=reads
        )
        results = await run_jobs(engine, [job])
        return results.outboxes[0].finished[0].cached_tokens

    assert await cached(reads=True) == 0
    assert await cached(reads=False) == 0
    assert await cached(reads=True) >= 128


async def test_engine_reports_the_prefixes_in_its_cache(engine: VllmEngine) -> None:
    size, held = engine.info.cache_block_tokens, Held()
    first = make_job(
        prompt_token_ids=[300 + index % 700 for index in range(size * 2)],
        max_tokens=size + 1,
        sampling=spec(temperature=0.0, ignore_eos=True),
        cache_salt="mine",
    )
    results = await run_jobs(engine, [first])
    # The next turn of the chat finds the first one's prompt and response.
    prompt = [*first.prompt_token_ids, *results.token_ids(0), *range(300, 310)]
    second = make_job(prompt_token_ids=prompt, max_tokens=1, cache_salt="mine")
    other = make_job(prompt_token_ids=prompt, max_tokens=1, cache_salt="theirs")
    await read_cache(engine, held, lambda: held.tokens(second, size)[:1] == [3 * size])
    assert held.tokens(second, size) == [3 * size, 2 * size, size]
    assert held.tokens(other, size) == []
    assert (await run_jobs(engine, [second])).outboxes[0].finished[0].cached_tokens == 3 * size
    await engine._llm.reset_prefix_cache()
    # Without another step the engine sends no event.
    await run_jobs(engine, [make_job(prompt_token_ids=[5] * (size + 9), max_tokens=2)])
    await read_cache(engine, held, lambda: held.tokens(second, size) == [])
    assert len(held.digests) == 1


async def test_sleep_empties_the_cache_and_the_same_tokens_follow(engine: VllmEngine) -> None:
    size, held = engine.info.cache_block_tokens, Held()
    same: dict[str, Any] = {
        "prompt_token_ids": [320 + index % 700 for index in range(2 * size + 1)],
        "max_tokens": 20,
        "cache_salt": "slept",
        "seed": 3,
    }

    async def run() -> tuple[int, list[int]]:
        results = await run_jobs(engine, [make_job(**same)])
        return results.outboxes[0].finished[0].cached_tokens, results.token_ids(0)

    _, tokens = await run()
    assert await run() == (2 * size, tokens)
    await engine.sleep()
    await engine.wake()
    # What was cached before is not reported later.
    await engine.read_cache(held)
    assert held.digests == set()
    assert await run() == (0, tokens)
    await read_cache(engine, held, lambda: bool(held.tokens(make_job(**same), size)))


async def test_engine_reports_its_features(engine: VllmEngine) -> None:
    assert engine.info.features == [each for each in Feature if each is not Feature.IMAGES]
    assert engine.info.chat_templates == folder_templates(MODEL_FOLDER)
    assert engine.info.chat is not None
    assert engine.info.chat.special_tokens == folder_special_tokens(MODEL_FOLDER)
    assert (engine.info.chat.tool_parser, engine.info.chat.reasoning_parser) == ("hermes", "qwen3")
    assert engine.info.eos_token_ids == [EOS]
    assert (engine.info.image_token, engine.info.max_images) == ("", 0)


def test_processes_of_an_engine_wait_for_each_other_without_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)
    monkeypatch.setattr("os.sched_yield", lambda: pytest.fail("uses a core"))
    prepare_waits()
    queue = shm_broadcast.MessageQueue(1, 1)
    reader = shm_broadcast.MessageQueue.create_from_handle(queue.export_handle(), 0)
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.01)
