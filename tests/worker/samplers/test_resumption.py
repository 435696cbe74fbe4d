"""Resumption after earlier tokens, on both of vLLM's model runners."""

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
from msgspec.structs import replace

from contract.sampling import SamplingSpec
from tests.worker.samplers.conftest import Runners
from tests.worker.samplers.engines import Request, Side
from tests.worker.samplers.test_engine import (
    FEW,
    FLAT_DRY,
    FLAT_XTC,
    GREEDY,
    LLAMA_CPP,
    MIROSTAT,
    MIROSTAT_1,
    PROMPT,
    SIGMA,
    TOKENIZER,
)

THINKING_PROMPT = TOKENIZER.encode("<|user|>Think: what is 27 + 35?\n<|assistant|><think>").ids
THOUGHT, CALL, CALL_END = TOKENIZER.encode("</think><tool_call></tool_call>").ids

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RESUMED = {
    "greedy": GREEDY,
    "seeded": SamplingSpec(seed=21, temperature=1.6),
    "truncated": SamplingSpec(seed=22, temperature=2.0, top_p=0.9, top_k=5, min_p=0.01),
    "presence": SamplingSpec(seed=23, temperature=2.0, presence_penalty=1.5, allowed_token_ids=FEW),
    "repetition": replace(GREEDY, repetition_penalty=1.3, allowed_token_ids=FEW),
    "penalties": replace(SIGMA, temperature=0.0, allowed_token_ids=FEW),
    "chain": replace(LLAMA_CPP, temperature=2.0, allowed_token_ids=FEW),
    "dry": FLAT_DRY,
    "xtc": FLAT_XTC,
    "mirostat": MIROSTAT,
    "mirostat 1": MIROSTAT_1,
}


@pytest.fixture(scope="module", autouse=True)
def _last(runners: Runners) -> Iterator[None]:
    """No later module needs the engines, each of which has 3 GB of memory."""
    yield
    runners.close()


@pytest.fixture
def is_thorough(request: pytest.FixtureRequest, side: Side) -> bool:
    """Whether sequences are cut everywhere, and not only where the state changes."""
    return side.is_fast or bool(request.config.getoption("--long"))


def test_sequence_resumes_exactly_after_earlier_tokens(side: Side, *, is_thorough: bool) -> None:
    length = 40 if side.is_fast else 12 if is_thorough else 6
    whole = [Request(prompt=PROMPT, max_tokens=length, sampling=spec) for spec in RESUMED.values()]
    undisturbed = [each.tokens for each in side.generate(whole)]
    for cut in (1, 5, length - 1) if is_thorough else (3, length - 1):
        requests = [
            dataclasses.replace(each, output=tokens[:cut])
            for each, tokens in zip(whole, undisturbed, strict=True)
        ]
        rest = side.generate(requests)
        for name, tokens, completion in zip(RESUMED, undisturbed, rest, strict=True):
            again = cut if name.startswith("mirostat") else 0
            assert (name, cut, completion.tokens[again:]) == (name, cut, tokens[cut:])
            assert completion.tokens[:again] == tokens[:again]


def test_grammar_resumes_after_earlier_tokens(side: Side, *, is_thorough: bool) -> None:
    whole = Request(
        prompt=PROMPT,
        max_tokens=16,
        sampling=SamplingSpec(seed=3, temperature=1.6),
        grammar="start: /[0-9]{3}-alphanumerical( [a-z]{3}){1,4}/",
    )
    (undisturbed,) = side.generate([whole])
    cuts = range(1, 12) if is_thorough else (2, 11)
    assert_goes_on(side, whole, undisturbed.tokens, cuts=cuts)


@pytest.mark.parametrize(
    ("side", "budget"),
    [
        ("v2-ahead", 5),
        *(
            pytest.param(side, budget, marks=pytest.mark.long)
            for side in ("v1", "v2", "v2-ahead")
            for budget in (None, 0, 5)
            if (side, budget) != ("v2-ahead", 5)
        ),
    ],
    indirect=["side"],
)
def test_reasoning_and_its_call_resume_after_earlier_tokens(
    side: Side, budget: int | None, *, is_thorough: bool
) -> None:
    # Without a budget the grammar determines the length of the reasoning.
    thought = "/[a-z ]{9,20}/" if budget is None else r"/(.|\n)*/"
    start, end = f"<[{THOUGHT}]> <[{CALL}]>", f"<[{CALL_END}]>"
    whole = Request(
        prompt=THINKING_PROMPT,
        max_tokens=40,
        sampling=SamplingSpec(seed=4, thinking_budget=budget),
        grammar=(
            f'start: thought {start} "{{\\"name\\": \\"" /f[0-9]{{4}}/ "\\"}}" {end}\n'
            f"thought: {thought}"
        ),
    )
    (undisturbed,) = side.generate([whole])
    tokens = undisturbed.tokens[: undisturbed.tokens.index(CALL_END) + 1]
    end_of_thought, last = tokens.index(THOUGHT), len(tokens) - 1
    if budget is not None:
        assert end_of_thought == budget
    # Before and after the end of the thought, in the call, and before its end.
    telling = {max(end_of_thought, 1), end_of_thought + 1, last - 3, last}
    cuts = range(1, len(tokens)) if is_thorough else sorted(telling)
    assert_goes_on(side, whole, tokens, cuts=cuts)


def assert_goes_on(side: Side, whole: Request, tokens: list[int], *, cuts: Sequence[int]) -> None:
    """Assert that the tokens after each cut are those of the undisturbed sequence."""
    whole = dataclasses.replace(whole, max_tokens=len(tokens))
    rest = side.generate([dataclasses.replace(whole, output=tokens[:cut]) for cut in cuts])
    for cut, completion in zip(cuts, rest, strict=True):
        assert (cut, completion.tokens[: len(tokens) - cut]) == (cut, tokens[cut:])
