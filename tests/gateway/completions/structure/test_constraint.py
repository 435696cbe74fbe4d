"""Reasoning, calls and structures in one grammar."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from gateway.completions.structure.constraint import Constraint, added_tokens, to_grammar
from gateway.completions.structure.lark import TokenIds
from gateway.dialects.request import Reasoning, Structure, StructureKind, Tool, ToolMode, ToolUse

AcceptsIds = Callable[[str, list[int]], bool]

OPEN = Reasoning("<think>", "</think>", is_open=True)
UNMARKED = Reasoning("<think>", "</think>", is_open=False)
SPELLED_OUT = Reasoning("[THINK]", "[/THINK]", is_open=False)
YES = Structure(StructureKind.CHOICE, ["yes", "no"], "response_format")
STRUCTURES = [
    YES,
    Structure(StructureKind.REGEX, "yes|no", "x"),
    Structure(StructureKind.JSON_SCHEMA, {"enum": ["yes"]}, "x"),
    Structure(StructureKind.GBNF, 'root ::= answer\nanswer ::= "yes" | "no"', "x"),
    Structure(StructureKind.LARK, 'start: thought\nthought: "yes" | "}"', "x"),
    Structure(StructureKind.LLGUIDANCE, {"grammars": [{"lark_grammar": 'start: "yes"'}]}, "x"),
]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "weather", "arguments": {"town": 1}}\n</tool_call>'


def use(mode: ToolMode, *, is_strict: bool = False, is_parallel: bool = True) -> ToolUse:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [Tool("weather", schema, is_strict)]
    return ToolUse(tools, mode, "weather" if mode is ToolMode.NAMED else None, is_parallel)


@pytest.fixture(scope="session")
def token_ids(tokenizer_json: bytes) -> TokenIds:
    return added_tokens(tokenizer_json)


@pytest.fixture
def wrongly_taken(
    tokenizer: Tokenizer, token_ids: TokenIds, accepts_ids: AcceptsIds
) -> Callable[..., list[str]]:
    """Return which of the texts a constraint takes or refuses wrongly."""

    def texts(constraint: Constraint, good: list[str], bad: list[str]) -> list[str]:
        grammar = to_grammar(constraint, token_ids)

        def taken(text: str) -> bool:
            return accepts_ids(grammar, tokenizer.encode(text, add_special_tokens=False).ids)

        return [t for t in good if not taken(t)] + [t for t in bad if taken(t)]

    return texts


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: structure.kind)
@pytest.mark.parametrize("reasoning", [OPEN, UNMARKED], ids=["open", "unmarked"])
def test_a_structure_begins_where_reasoning_ends(
    wrongly_taken: Callable[..., list[str]], structure: Structure, reasoning: Reasoning
) -> None:
    answer = '"yes"' if structure.kind is StructureKind.JSON_SCHEMA else "yes"
    good = [f"Let me see:\n{{no}} < a</think>{answer}", f"</think>{answer}"]
    bad = [
        answer,
        "Let me see",
        "hm</think>",
        f"hm</think>maybe{answer}",
        f"a</think>b</think>{answer}",
    ]
    begun = f"<think>hm</think>{answer}"
    (bad if reasoning.is_open else good).append(begun)
    assert wrongly_taken(Constraint(structure, None, reasoning), good, bad) == []


def test_reasoning_may_have_marks_that_are_spelled_out(
    wrongly_taken: Callable[..., list[str]],
) -> None:
    good = ["[THINK]a\n[b[/THINK]yes", "a[/THINK]no", "[/THINK]no"]
    bad = ["yes", "a[/THINK]maybe", "a[/THINK]b[/THINK]yes"]
    assert wrongly_taken(Constraint(YES, None, SPELLED_OUT), good, bad) == []


@pytest.mark.parametrize(
    ("tool_use", "good", "bad"),
    [
        (use(ToolMode.NAMED), [WEATHER], ["", "Hi", WRONG, WEATHER + WEATHER]),
        (use(ToolMode.REQUIRED), [WEATHER, WEATHER + "\n" + WEATHER], ["", "Hi", WRONG]),
        (
            use(ToolMode.AUTO, is_strict=True),
            ["", "Hi", "Hi" + WEATHER + WEATHER + "!"],
            [WRONG, "Hi<tool_call>"],
        ),
    ],
    ids=["named", "required", "auto"],
)
def test_calls_come_after_reasoning_and_not_within(
    wrongly_taken: Callable[..., list[str]],
    tool_use: ToolUse,
    good: list[str],
    bad: list[str],
) -> None:
    good = [f"I call <tool, then.\n\n</think>{text}" for text in good]
    bad = [*(f"hm</think>{text}" for text in bad), WEATHER, f"hm{WEATHER}"]
    assert wrongly_taken(Constraint(None, tool_use, UNMARKED), good, bad) == []


def test_without_parallel_calls_there_is_one_at_most(
    wrongly_taken: Callable[..., list[str]],
) -> None:
    required = Constraint(None, use(ToolMode.REQUIRED, is_parallel=False), None)
    assert (
        wrongly_taken(required, [WEATHER], ["", WEATHER + WEATHER, WEATHER + "\n" + WEATHER]) == []
    )
    auto = Constraint(None, use(ToolMode.AUTO, is_parallel=False), None)
    good = ["", "Hi", WEATHER, "Hi" + WEATHER + "so", WRONG]
    assert wrongly_taken(auto, good, [WEATHER + WEATHER, "Hi" + WEATHER + "and" + WEATHER]) == []


@pytest.mark.parametrize("reasoning", [None, OPEN], ids=["plain", "reasoning"])
def test_response_is_calls_or_matches_the_structure(
    wrongly_taken: Callable[..., list[str]], reasoning: Reasoning | None
) -> None:
    before = "" if reasoning is None else "hm</think>"
    good = [before + text for text in ("yes", WEATHER, WEATHER + WEATHER)]
    bad = [before + text for text in ("", "maybe", "yes" + WEATHER, WEATHER + "yes", WRONG)]
    strict = use(ToolMode.AUTO, is_strict=True)
    assert wrongly_taken(Constraint(YES, strict, reasoning), good, bad) == []


def test_a_structure_alone_is_not_wrapped(token_ids: TokenIds) -> None:
    assert "%lark" not in to_grammar(Constraint(YES, None, None), token_ids)
