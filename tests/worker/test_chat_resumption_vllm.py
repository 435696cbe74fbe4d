"""A chat on the real engine resumes after any of its tokens with the same response.

The parts before and after the cut, from vLLM's parser of reasoning, join to the undisturbed
reasoning, content and calls with their arguments. The engine computes in float32: with fewer bits
a CPU's results depend on the rest of the batch.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from contract.messages import Delta, GenerationJob, Parsing, Resumption, SequenceProgress
from contract.outcomes import FinishReason
from contract.sampling import SamplingSpec
from gateway.completions.structure.constraint import Constraint, added_tokens, to_grammar
from gateway.dialects.request import Reasoning, Tool, ToolMode, ToolUse
from tests.worker.conftest import MODEL_FOLDER, make_job
from tests.worker.parsing.cases import Whole, whole
from tests.worker.real_engine import EXACT, MARKS, EngineSlot, generation_of, run_jobs
from worker.engine.base import SequenceOutput
from worker.engine.vllm.engine import VllmEngine
from worker.parsing.base import Parsed

pytestmark = MARKS

TOKENIZER_JSON = (MODEL_FOLDER / "tokenizer.json").read_bytes()
TOKENIZER = Tokenizer.from_buffer(TOKENIZER_JSON)
SUM = "<|user|>What is 27 + 35?\n"
WEATHER = "<|user|>What is the weather in Paris?\n"
OPEN, CLOSED = "<|assistant|><think>", "</think><|assistant|>"
GREEDY = SamplingSpec(seed=1, temperature=0.0)
HOT = SamplingSpec(seed=2, temperature=1.6)

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "take_note": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "minLength": 10, "maxLength": 20},
            "lines": {
                "type": "array",
                "items": {"type": "string", "minLength": 5, "maxLength": 12},
                "minItems": 2,
                "maxItems": 2,
            },
        },
        "required": ["title", "lines"],
        "additionalProperties": False,
    },
}
DESCRIPTIONS = {"get_weather": "Get the weather in a city", "take_note": "Keep a text"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "description": DESCRIPTIONS[name], "parameters": schema},
    }
    for name, schema in SCHEMAS.items()
]


def chat(
    text: str, opening: str, tools: Sequence[dict[str, Any]] = (), **changes: Any
) -> GenerationJob:
    """Return the job of a chat with these messages, in the demo model's template."""
    described = "<|system|>Tools:" + "".join(f"\n{json.dumps(tool)}" for tool in tools) + "\n"
    prompt = (described if tools else "") + text + opening
    parsing = Parsing(tools=list(tools), finds_reasoning=True, opening_tokens=2)
    return make_job(
        prompt_token_ids=TOKENIZER.encode(prompt, add_special_tokens=False).ids,
        parsing=parsing,
        shows_special_tokens=True,
        **{"max_tokens": 100, "sampling": GREEDY, **changes},
    )


def forced(mode: ToolMode, name: str | None = None, *, opening: str) -> str:
    """Return the grammar with which gateways force calls."""
    tools = [Tool(each, schema, is_strict=False) for each, schema in SCHEMAS.items()]
    reasoning = Reasoning("<think>", "</think>", is_open=True) if opening == OPEN else None
    use = ToolUse(tools, mode, name)
    return to_grammar(Constraint(None, use, reasoning), added_tokens(TOKENIZER_JSON))


NAMED = forced(ToolMode.NAMED, "take_note", opening=CLOSED)
BOUNDED = msgspec.structs.replace(HOT, thinking_budget=9)
JOBS = {
    "plain": chat("<|user|>Write a short story.\n", CLOSED),
    "emoji": chat("<|user|>Goodbye\n", CLOSED),
    "reasoning": chat(SUM, OPEN),
    "reasoning ended by a budget": chat(SUM, OPEN, sampling=BOUNDED, max_tokens=50),
    "reasoning of several, gathered": chat(
        SUM, OPEN, sampling=HOT, n=2, best_of=2, stream=False, max_tokens=70
    ),
    "call by itself": chat(WEATHER, CLOSED, TOOLS[:1]),
    "named call": chat(WEATHER, CLOSED, TOOLS, sampling=HOT, grammar=NAMED),
    "named call, cut off": chat(
        WEATHER, CLOSED, TOOLS, sampling=HOT, grammar=NAMED, max_tokens=30
    ),
    "named call, stopped": chat(
        WEATHER, CLOSED, TOOLS, sampling=HOT, grammar=NAMED, stop=['", "lines', "never"]
    ),
    "required call after reasoning": chat(
        WEATHER,
        OPEN,
        TOOLS,
        sampling=BOUNDED,
        grammar=forced(ToolMode.REQUIRED, opening=OPEN),
        stop=["never to be found"],
    ),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(engine_slot: EngineSlot) -> VllmEngine:
    return await engine_slot.engine(**EXACT)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(engine: VllmEngine) -> dict[str, list[Delta]]:
    """Deltas of each undisturbed job."""
    results = await run_jobs(engine, list(JOBS.values()))
    return {name: box.deltas for name, box in zip(JOBS, results.outboxes, strict=True)}


def tokens_of(deltas: Sequence[Delta], sequence: int) -> list[int]:
    return [token for each in deltas if each.choice == sequence for token in each.token_ids]


def answers_of(deltas: Sequence[Delta], choices: int) -> list[tuple[Whole, list[int], object]]:
    """Return the joined deltas of each choice."""
    return [
        (answer_of(mine), tokens_of(mine, choice), (mine[-1].finish_reason, mine[-1].stop_reason))
        for choice in range(choices)
        if (mine := [each for each in deltas if each.choice == choice])
    ]


def answer_of(deltas: Sequence[Delta]) -> Whole:
    reported = whole([Parsed(each.text, each.reasoning, each.calls) for each in deltas])
    reported.reasoning_tokens = sum(each.reasoning_tokens for each in deltas)
    return reported


def deltas_before(
    engine: VllmEngine, job: GenerationJob, tokens: Sequence[list[int]]
) -> list[Delta]:
    """Return the deltas of the first tokens of each sequence, sent before the worker ends."""
    generation = generation_of(engine, job)
    for sequence, token_ids in zip(generation.sequences, tokens, strict=True):
        for token_id in token_ids:
            generation.receive(SequenceOutput(sequence.id, [token_id]))
    generation.send_pending()
    return generation.outbox.deltas


@pytest.mark.parametrize("name", JOBS)
async def test_chat_resumes_after_any_cut(
    request: pytest.FixtureRequest,
    engine: VllmEngine,
    undisturbed: dict[str, list[Delta]],
    name: str,
) -> None:
    job, expected = JOBS[name], undisturbed[name]
    every = 1 if request.config.getoption("--long") else 3
    tokens = [tokens_of(expected, sequence) for sequence in range(job.n)]
    cuts = range(1, min(map(len, tokens)), every)
    known = {cut: [each[:cut] for each in tokens] for cut in cuts}
    rest = [
        msgspec.structs.replace(
            job,
            resumption=Resumption(
                [SequenceProgress(each) for each in known[cut]],
                prompt_tokens=len(job.prompt_token_ids),
            ),
        )
        for cut in cuts
    ]

    results = await run_jobs(engine, rest)

    whole_answers = answers_of(expected, job.n)
    for cut, outbox in zip(cuts, results.outboxes, strict=True):
        reported = [*deltas_before(engine, job, known[cut]), *outbox.deltas]
        assert (cut, answers_of(reported, job.n)) == (cut, whole_answers)
        assert outbox.finished[0].completion_tokens == sum(map(len, tokens))


async def test_jobs_cover_their_cases(undisturbed: dict[str, list[Delta]]) -> None:
    answers = {name: answers_of(deltas, 1)[0] for name, deltas in undisturbed.items()}
    content = {name: answer.content for name, (answer, _, _) in answers.items()}
    assert len(content["plain"]) > 100
    assert "😀" in content["emoji"]
    for name in ("reasoning", "required call after reasoning"):
        answer = answers[name][0]
        assert answer.reasoning
        assert answer.reasoning_tokens
    assert answers["reasoning ended by a budget"][0].reasoning_tokens == 10
    assert content["reasoning"].strip() == "27 + 35 = 62"
    calls = {name: answer.calls for name, (answer, _, _) in answers.items()}
    assert calls["call by itself"] == [("get_weather", '{"city": "Paris"}')]
    for name in ("named call", "required call after reasoning"):
        ((_, arguments), *_) = calls[name]
        assert json.loads(arguments)
    ((_, cut_off),) = calls["named call, cut off"]
    assert answers["named call, cut off"][2] == (FinishReason.LENGTH, None)
    assert calls["named call"][0][1].startswith(cut_off)
    assert answers["named call, stopped"][2] == (FinishReason.STOP, '", "lines')
