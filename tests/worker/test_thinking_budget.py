"""Tokens of reasoning are counted by token ids alone, and grammars accept its end."""

from dataclasses import dataclass
from random import Random

from llguidance import LLMatcher, LLTokenizer

from tests.support.cases import all_cases
from tests.worker.conftest import MODEL_FOLDER
from worker.engine.vllm.thinking_budget import ReasoningCount, reset_incomplete_character

START, END = 7, 8


def counted(prompt: list[int], *outputs: list[int]) -> int | None:
    count = ReasoningCount(START, END)
    count.begin(prompt)
    for output in outputs:
        count.read_on(output)
    return count.tokens


def reasoning_by_definition(token_ids: list[int]) -> int | None:
    """Tokens after the last mark if it begins reasoning."""
    marks = [i for i, token_id in enumerate(token_ids) if token_id in (START, END)]
    if not marks or token_ids[marks[-1]] == END:
        return None
    return len(token_ids) - 1 - marks[-1]


@all_cases(
    ("prompt", "output", "tokens"),
    [
        ([1], [1, 2], None),
        ([1, START], [], 0),
        ([START, 1], [2], 2),
        ([1], [START, 1, 2, 3], 3),
        ([START], [1, END, 2], None),
        ([START, 1, END], [1, 2], None),
        ([1], [END, 1, START, 2], 1),
        ([1], [START, 1, END, 2, START, 3, 4], 2),
        ([START, 1], [START, 2], 1),
    ],
)
def test_reasoning_is_the_text_after_its_opening_mark(
    prompt: list[int], output: list[int], tokens: int | None
) -> None:
    assert counted(prompt, output) == tokens


@all_cases("seed", range(20))
def test_count_is_the_same_after_any_cut(seed: int) -> None:
    rng = Random(seed)
    prompt, output = ([rng.choice([1, 1, 2, START, END]) for _ in range(20)] for _ in range(2))
    for cut in range(len(output) + 1):
        behind_cut = [output[:length] for length in range(cut, len(output) + 1)]
        assert counted(prompt, *behind_cut) == reasoning_by_definition(prompt + output)


TOKENIZER = LLTokenizer((MODEL_FOLDER / "tokenizer.json").read_text())
THOUGHT = 10
GRAMMAR = f"start: thought <[{THOUGHT}]> answer\nthought: /(.|\\n)*/\nanswer: /[0-9]+/"


@dataclass
class Grammar:
    """The part of vLLM's `GuidanceGrammar` that is used."""

    ll_matcher: LLMatcher
    ll_tokenizer: LLTokenizer = TOKENIZER

    def validate_tokens(self, token_ids: list[int]) -> list[int]:
        return token_ids[: self.ll_matcher.validate_tokens(token_ids)]

    def accept(self, output: list[int], token_id: int) -> bool:
        reset_incomplete_character(self, output, token_id)
        return self.ll_matcher.consume_token(token_id)


@all_cases("text", ["", "ab", "ab 😀", "é", "日本語", "a😀b\n"])
def test_reasoning_may_end_within_a_character(text: str) -> None:
    tokens = TOKENIZER.tokenize_str(text)
    answer = TOKENIZER.tokenize_str("42")
    for cut in range(len(tokens) + 1):
        output = [*tokens[:cut], THOUGHT, *answer]
        grammar = Grammar(LLMatcher(TOKENIZER, GRAMMAR, log_level=0))
        accepted = [grammar.accept(output[:i], token_id) for i, token_id in enumerate(output)]
        assert accepted == [True] * len(output)
        assert grammar.ll_matcher.is_accepting()


def test_other_tokens_stay_forbidden_after_a_partial_character() -> None:
    half = TOKENIZER.tokenize_str("😀")[:2]
    grammar = Grammar(LLMatcher(TOKENIZER, GRAMMAR, log_level=0))
    end_of_text = 1
    output = [*half, end_of_text]
    assert [grammar.accept(output[:i], token_id) for i, token_id in enumerate(output)] == [
        True,
        True,
        False,
    ]
