"""vLLM's parser classes without an engine: their results, which no cut changes."""

import json
import os
import random
import re
from collections.abc import Callable, Iterable
from functools import cache

import msgspec
import pytest

from contract.messages import Parsing
from contract.outcomes import FinishReason
from tests.worker.parsing.cases import (
    CALLS,
    CASES,
    PARSING,
    REASONING,
    THINK,
    TOOLS,
    Case,
    Whole,
    make_tokenizer,
    named_calls,
    plain,
    read,
    read_whole,
    tokens_of,
    whole,
)
from worker.engine.base import InvalidRequestError
from worker.engine.vllm.parsers import VllmParsers
from worker.execution.logprobs import TokenTexts
from worker.parsing.base import Parser
from worker.parsing.hermes import ends_in_string
from worker.parsing.reader import ParsedOutput, Reader

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENIZER = make_tokenizer()
END = TOKENIZER.encode("</s>").ids[0]


@cache
def parsers(tool: str, reasoning: str) -> VllmParsers:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return VllmParsers(tool, reasoning, TOKENIZER.to_str().encode())


def maker(case: Case, opening: str = "") -> Callable[[], Parser]:
    ids = TOKENIZER.encode(opening, add_special_tokens=False).ids
    make = parsers(case.tool, case.reasoning).prepare_vllm(PARSING, ids)
    assert make is not None
    return make


def cuts(request: pytest.FixtureRequest, end: int) -> range:
    """Return lengths below `end`, the last one included: every fourth, or all with --long."""
    if request.config.getoption("--long"):
        return range(end)
    return range((end - 1) % 4, end, 4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reads_calls_reasoning_and_content(case: Case) -> None:
    answer = read_whole(maker(case)(), tokens_of(TOKENIZER, case.text))
    if case.calls:
        assert [(name, json.loads(text)) for name, text in answer.calls] == CALLS
    has_reasoning = case.text.startswith("<think>")
    assert answer.reasoning.strip() == (REASONING if has_reasoning else "")
    marked = tokens_of(TOKENIZER, case.text.partition("</think>")[0] + "</think>")
    assert answer.reasoning_tokens == (len(marked) - 1 if has_reasoning else 0)
    if case.calls:
        assert "get_weather" not in answer.content
    else:
        assert answer.content.strip() == "The answer is <b>4</b>."


@pytest.mark.parametrize("case", CASES, ids=str)
def test_resumed_response_is_identical_at_every_cut(
    request: pytest.FixtureRequest, case: Case
) -> None:
    make, tokens = maker(case), tokens_of(TOKENIZER, case.text)
    one = make()
    uncut = [*read(one, tokens), plain(one.finish(FinishReason.STOP))]
    for cut in cuts(request, len(tokens) + 1):
        resumed = make()
        read(resumed, tokens[:cut])
        rest = [*read(resumed, tokens[cut:]), plain(resumed.finish(FinishReason.STOP))]
        assert rest == uncut[cut:], f"cut after {cut} tokens"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_call_that_max_tokens_cuts_off_is_not_completed(
    request: pytest.FixtureRequest, case: Case
) -> None:
    make, tokens = maker(case), tokens_of(TOKENIZER, case.text)[:-1]
    full = read_whole(make(), tokens)
    for length in cuts(request, len(tokens)):
        parser = make()
        parts = read(parser, tokens[:length])
        end = parser.finish(FinishReason.LENGTH)
        assert not end.calls
        for (_, text), (_, everything) in zip(whole(parts).calls, full.calls, strict=False):
            assert everything.startswith(text.rstrip("}"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parsing_ends_as_in_vllm_at_a_final_token(case: Case) -> None:
    tokens = tokens_of(TOKENIZER, case.text)
    parser = maker(case)()
    theirs = read(parser, tokens[:-1])
    theirs.append(plain(parser._parse("", [END], is_finished=True)))  # type: ignore[attr-defined]
    mine = read_whole(maker(case)(), tokens)
    expected = whole(theirs)
    assert (mine.content, mine.reasoning, mine.calls) == (
        expected.content,
        expected.reasoning,
        expected.calls,
    )


MARKUP = TokenTexts(TOKENIZER).markup


def output_of(parser: Parser, tokens: Iterable[tuple[int, str]]) -> ParsedOutput:
    """Return what a client gets that sees no special tokens."""
    reader, output = Reader(parser, MARKUP), ParsedOutput()
    for token_id, text in tokens:
        reader.push(token_id, len(text), text)
        reader.read(output)
    reader.finish(FinishReason.LENGTH, output)
    return output


@pytest.mark.parametrize("case", [case for case in CASES if case.tool], ids=str)
def test_what_is_no_call_is_content(request: pytest.FixtureRequest, case: Case) -> None:
    head, end, answer = case.text.rpartition("</think>")
    tokens = tokens_of(TOKENIZER, answer)[:-1]
    texts = [tokens[:length] for length in cuts(request, len(tokens))]
    nameless = answer.replace('"name"', '"degrees"')
    for name, _ in CALLS:
        nameless = nameless.replace(name, "")
    texts += [tokens_of(TOKENIZER, each)[:-1] for each in (nameless, f"{nameless} So.", "[x] {1}")]
    for written in texts:
        parsings = [parsers(case.tool, case.reasoning).prepare(PARSING, []), maker(case)]
        for make in filter(None, parsings):
            output = output_of(make(), [*tokens_of(TOKENIZER, head + end)[:-1], *written])
            if output.calls:
                assert output.calls[0].name
            else:
                shown = "".join(text for token_id, text in written if token_id not in MARKUP)
                assert output.content.split() == shown.split()


@pytest.mark.parametrize("reasoning", ["deepseek_r1", "qwen3", "glm45", "kimi_k2"])
def test_opening_in_the_prompt_decides_whether_the_response_reasons(reasoning: str) -> None:
    case = Case("hermes", reasoning, "")
    inside = read_whole(maker(case, "<think>\n")(), tokens_of(TOKENIZER, "so</think>ok"))
    assert (inside.reasoning, inside.content) == ("so", "ok")
    assert inside.reasoning_tokens == len(tokens_of(TOKENIZER, "so</think>")) - 1
    after = read_whole(maker(case, "<think>\n\n</think>\n\n")(), tokens_of(TOKENIZER, "ok"))
    assert after == Whole("ok", "", [], 0)


def test_only_requested_formats_are_parsed() -> None:
    case = CASES[2]
    some = parsers(case.tool, case.reasoning)
    tokens = tokens_of(TOKENIZER, case.text)
    assert some.prepare(Parsing(), []) is None
    for prepare in (some.prepare, some.prepare_vllm):
        make = prepare(Parsing(tools=TOOLS), [])
        assert make is not None
        answer = read_whole(make(), tokens)
        assert answer.content == case.text.partition("<tool_call>")[0]
        assert len(answer.calls) == 2
        make = prepare(Parsing(finds_reasoning=True), [])
        assert make is not None
        answer = read_whole(make(), tokens)
        assert (answer.content, answer.calls) == (case.text.partition("</think>")[2], [])


def test_tools_that_a_parser_rejects_are_refused() -> None:
    some = parsers("qwen3_xml", "")
    with pytest.raises(InvalidRequestError, match="does not take the tools"):
        some.prepare(Parsing(tools=[{"type": "function", "function": {}}]), [])


# --- our own parsers, which must yield the same as vLLM's -----------------------------------------

PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_", "call>", "</tool", "\n", " ",
    '{"name": "get_weather", "arguments": ', '{"city": "a b"}', "}", "{", '"', "\\", '\\"',
    '"name": "f"',
    '"name" : ', '"arguments":', '"arguments" : \n', "[1, {}]", "null", " text ", "日本",
    "😀", ", ", "]", "  ",
    '{"name": "f", "arguments": {}}',
    '{"arguments": {"x": {"y": [1]}}, "name": "late"}', '"x": "\\u00e9"',
    *('<tool_call>{"name": "f", "arguments": {}}</tool_call>\n' for _ in range(9)),
]  # fmt: skip


def random_text(seed: int) -> str:
    chooser = random.Random(seed)
    text = "".join(chooser.choices(PIECES, k=chooser.randrange(1, 30)))
    return chooser.choice(["", "<think>", "so</think>", "<tool_call>"]) + text


def split_at_calls(text: str) -> tuple[list[str], list[str]] | None:
    """Return the text outside of calls and the calls; None if they cannot be separated."""
    outside, *regions = re.split("(?=<tool_call>)", text)
    contents, calls = [outside], list[str]()
    for region in regions:
        written, _, after = region.removeprefix("<tool_call>").partition("</tool_call>")
        if ends_in_string(written) or re.search(
            r'[^\s{].*"name"|"name".*"name"', written, re.DOTALL
        ):
            return None
        if re.match(r'\s*{?\s*"name"\s*:\s*"', written):
            calls.append(region)
            contents.append(after)
        else:
            contents.append(region)
    return contents, calls


@pytest.mark.parametrize(
    ("reasoning", "texts"),
    [
        ("", 300),
        ("deepseek_r1", 300),
        ("qwen3", 150),
        ("glm45", 50),
        ("kimi_k2", 50),
        ("step3p5", 50),
        ("mimo", 50),
        ("nemotron_v3", 50),
        ("deepseek_v3", 50),
    ],
)
def test_our_hermes_yields_what_vllms_does(
    request: pytest.FixtureRequest, reasoning: str, texts: int
) -> None:
    texts = texts if request.config.getoption("--long") else texts // 5
    some = parsers("hermes", reasoning)
    for text in [case.text for case in CASES[:3]] + [random_text(seed) for seed in range(texts)]:
        opening = TOKENIZER.encode("<think>" if len(text) % 2 else "").ids
        mine, theirs = some.prepare(PARSING, opening), some.prepare_vllm(PARSING, opening)
        assert mine is not None
        assert theirs is not None
        if (found := split_at_calls(text)) is None:
            continue
        (outside, *later), calls = found
        tokens = tokens_of(TOKENIZER, text)
        one, two = mine(), theirs()
        ours, vllms = read(one, tokens), read(two, tokens)
        answer = whole([*ours, one.finish(FinishReason.LENGTH)])
        if len(later) == len(calls) and all("</tool_call>" in each for each in calls[:-1]):
            # vLLM drops text after a call, and at the end what could have begun a call.
            expected = whole([*vllms, two.finish(FinishReason.LENGTH)])
            assert answer.content.startswith(expected.content)
            assert [(each.reasoning, each.calls) for each in ours] == [
                (each.reasoning, each.calls) for each in vllms
            ], text
        if not reasoning:
            assert len(answer.calls) == len(calls), text
            assert answer.content.split() == "".join([outside, *later]).split(), text


FORCED = msgspec.structs.replace(PARSING, has_hermes_calls=True)


@pytest.mark.parametrize("case", [case for case in CASES if case.tool], ids=str)
def test_forced_calls_are_found_whatever_the_models_own_format(
    case: Case,
) -> None:
    text = "".join(f"<tool_call>{call}</tool_call>" for call in named_calls("arguments"))
    is_open = case.text.startswith("<think>")
    tokens = tokens_of(TOKENIZER, THINK + text if is_open else text)
    make = parsers(case.tool, case.reasoning).prepare(
        msgspec.structs.replace(FORCED, finds_reasoning=is_open), []
    )
    assert make is not None
    answer = read_whole(make(), tokens)
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == CALLS
    assert answer.reasoning.strip() == (REASONING if is_open else "")
    assert answer.content.strip() == ""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_special_tokens_do_not_appear_in_the_output(case: Case) -> None:
    thought, _, rest = case.text.rpartition("</think>")
    answers = []
    for special in ("", "<|im_end|>", "</s>", "</tool_response>"):
        text = (
            f"{thought and thought + special + '</think>'}{special}so {special}or {special}{rest}"
        )
        output = output_of(maker(case)(), tokens_of(TOKENIZER, text))
        answers.append((output.content, output.reasoning, output.calls))
    assert answers == answers[:1] * len(answers)


MARKS = [
    "a </tool_call> b",
    "</tool_call>\n<tool_call>\n{",
    '"</tool_call>" \\',
    "<tool_call>",
    "</think><|im_end|></s>",
    "</tool_call",
]


@pytest.mark.parametrize("case", [case for case in CASES if case.tool], ids=str)
def test_marks_inside_the_strings_of_a_call_are_text(case: Case) -> None:
    calls = [("get_weather", {mark: [mark], "all": {"of": "".join(MARKS)}}) for mark in MARKS]
    text = "\n".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        for name, arguments in calls
    )
    is_open = case.text.startswith("<think>")
    parsing = msgspec.structs.replace(FORCED, finds_reasoning=is_open)
    make = parsers(case.tool, case.reasoning).prepare(parsing, [])
    assert make is not None
    answer = read_whole(make(), tokens_of(TOKENIZER, THINK * is_open + text))
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == calls
    assert answer.content.strip() == ""


def test_our_reasoning_yields_what_vllms_does(request: pytest.FixtureRequest) -> None:
    some = parsers("", "deepseek_r1")
    texts = 300 if request.config.getoption("--long") else 60
    for text in [random_text(seed) for seed in range(texts)]:
        mine, theirs = some.prepare(PARSING, []), some.prepare_vllm(PARSING, [])
        assert mine is not None
        assert theirs is not None
        tokens = tokens_of(TOKENIZER, text)
        assert read(mine(), tokens) == read(theirs(), tokens), text
