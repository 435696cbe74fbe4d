"""The scripted engine in chats: reasoning, tool calls by their schemas, and resumption."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from contract.messages import Parsing
from contract.sampling import SamplingSpec
from gateway.completions.structure.constraint import Constraint, added_tokens, to_grammar
from gateway.dialects.request import Reasoning, Tool, ToolMode, ToolUse
from tests.worker.conftest import MODEL_FOLDER
from tests.worker.parsing.cases import Whole, read_whole
from worker.engine.base import EngineRequest, SequenceEnd
from worker.engine.scripted import Script, ScriptedEngine
from worker.engine.scripted_chats import read_sessions
from worker.parsing.own import OwnParsers

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTE = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "text": {"type": "string"}},
    "required": ["title", "text"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "take_note": NOTE}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
DESCRIBED = "<|system|>Tools:\n" + "\n".join(map(json.dumps, TOOLS)) + "\n"
USER = "<|user|>Hello\n"
OPEN, CLOSED = "<|assistant|><think>", "</think><|assistant|>"
EOS_ID = 1


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(MODEL_FOLDER, Script(completion_tokens=200))
    await engine.start()
    yield engine
    await engine.aclose()


def request_of(tokenizer: Tokenizer, prompt: str, **changes: Any) -> EngineRequest:
    request = EngineRequest(
        id="whole",
        prompt_token_ids=tokenizer.encode(prompt, add_special_tokens=False).ids,
        max_tokens=1_000,
        sampling=SamplingSpec(seed=7),
        seed=7,
        cache_salt="",
    )
    return replace(request, **changes)


async def tokens_of(
    engine: ScriptedEngine, request: EngineRequest
) -> tuple[list[int], SequenceEnd | None]:
    tokens: list[int] = []
    end = None
    await engine.submit([request])
    while end is None:
        for output in (await engine.step()).outputs:
            tokens += output.token_ids
            end = output.end
    return tokens, end


def read_apart(tokenizer: Tokenizer, request: EngineRequest, tokens: list[int]) -> Whole:
    """Parse a whole response as the worker does."""
    make = OwnParsers(tokenizer).prepare(
        Parsing(tools=TOOLS, finds_reasoning=True), request.prompt_token_ids[-2:]
    )
    assert make is not None
    texts, fed = "", list[tuple[int, str]]()
    for count, token in enumerate(tokens, start=1):
        so_far = tokenizer.decode(tokens[:count], skip_special_tokens=token == EOS_ID)
        text = "" if so_far.endswith("\ufffd") else so_far[len(texts) :]
        texts += text
        fed.append((token, text))
    return read_whole(make(), fed)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("prompt", "reasons", "calls"),
    [
        (USER + CLOSED, False, False),
        (USER + OPEN, True, False),
        (DESCRIBED + USER + CLOSED, False, True),
        (DESCRIBED + USER + OPEN, True, True),
    ],
    ids=["plain", "reasoning", "tools", "reasoning and tools"],
)
async def test_scripted_response_follows_the_prompt(
    engine: ScriptedEngine,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    reasons: bool,
    calls: bool,
    seed: int,
) -> None:
    request = request_of(tokenizer, prompt, seed=seed)
    tokens, end = await tokens_of(engine, request)
    reported = read_apart(tokenizer, request, tokens)
    assert end is SequenceEnd.STOP
    assert ("日本" in reported.reasoning, bool(reported.calls)) == (reasons, calls)
    assert reported.content.strip()
    for name, arguments in reported.calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize(
    "prompt", [USER + OPEN, DESCRIBED + USER + OPEN, DESCRIBED + USER + CLOSED]
)
async def test_scripted_response_resumes_after_any_cut(
    engine: ScriptedEngine, tokenizer: Tokenizer, prompt: str
) -> None:
    request = request_of(tokenizer, prompt)
    whole, end = await tokens_of(engine, request)
    for cut in range(1, len(whole)):
        rest = replace(request, id=f"after {cut}", output_token_ids=whole[:cut])
        assert await tokens_of(engine, rest) == (whole[cut:], end), cut


@pytest.mark.parametrize("opening", [OPEN, CLOSED])
@pytest.mark.parametrize(
    ("mode", "name", "is_parallel"),
    [
        (ToolMode.NAMED, "take_note", True),
        (ToolMode.REQUIRED, None, True),
        (ToolMode.REQUIRED, None, False),
        (ToolMode.AUTO, None, False),
    ],
)
async def test_scripted_calls_match_the_grammars_that_force_them(
    engine: ScriptedEngine,
    tokenizer: Tokenizer,
    opening: str,
    mode: ToolMode,
    name: str | None,
    *,
    is_parallel: bool,
) -> None:
    file = (MODEL_FOLDER / "tokenizer.json").read_bytes()
    tools = [Tool(each, schema, is_strict=False) for each, schema in SCHEMAS.items()]
    reasoning = Reasoning("<think>", "</think>", is_open=True) if opening == OPEN else None
    use = ToolUse(tools, mode, name, is_parallel)
    grammar = to_grammar(Constraint(None, use, reasoning), added_tokens(file))
    for seed in range(10):
        request = request_of(tokenizer, DESCRIBED + USER + opening, grammar=grammar, seed=seed)
        tokens, _ = await tokens_of(engine, request)
        matcher = LLMatcher(
            LLTokenizer(file.decode(), eos_token=EOS_ID), LLMatcher.grammar_from_lark(grammar)
        )
        text = tokens[:-1]
        assert matcher.try_consume_tokens(text) == len(text), matcher.get_error()
        assert matcher.is_accepting()
        calls = read_apart(tokenizer, request, tokens).calls
        assert [each for each, _ in calls] == ([name] if name else [calls[0][0]])


async def test_client_text_that_looks_like_a_tool_is_none(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    for text in ("{", "5", '{"name": 5}', '{"name": "f", "parameters": []}'):
        prompt = f'<|user|>{{"type": "function", "function": {text}\n{CLOSED}'
        request = request_of(tokenizer, prompt)
        tokens, _ = await tokens_of(engine, request)
        assert not read_apart(tokenizer, request, tokens).calls


async def test_ignored_end_of_text_continues_with_words(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    whole, _ = await tokens_of(engine, request_of(tokenizer, DESCRIBED + USER + CLOSED))
    ignoring = SamplingSpec(seed=7, ignore_eos=True)
    longer, end = await tokens_of(
        engine, request_of(tokenizer, DESCRIBED + USER + CLOSED, sampling=ignoring)
    )
    assert (len(longer), end) == (1_000, SequenceEnd.LENGTH)
    assert longer[: len(whole) - 1] == whole[:-1]
    assert EOS_ID not in longer


SESSION = """[{"when": "Fix it", "turns": [
  {"reasoning": "Look first.", "text": "I look.",
   "calls": [{"name": "read", "arguments": {"path": "a.py", "lines": [1, 2]}}]},
  {"text": "Done."}
]}]"""


async def test_scripted_session_answers_turn_by_turn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "sessions.json"
    file.write_text(SESSION)
    engine = ScriptedEngine(MODEL_FOLDER, Script(sessions=read_sessions(file)))
    await engine.start()
    first = f"{DESCRIBED}<|user|>Fix it\n{OPEN}"
    second = first.replace(OPEN, "<|assistant|>I look.</s><|tool|>text\n") + CLOSED
    found = []
    for prompt in (first, second):
        request = request_of(tokenizer, prompt)
        tokens, end = await tokens_of(engine, request)
        assert end is SequenceEnd.STOP
        whole = read_apart(tokenizer, request, tokens)
        calls = [(name, json.loads(arguments)) for name, arguments in whole.calls]
        found.append((whole.reasoning, whole.content.strip(), calls))
    assert found == [
        ("Look first.", "I look.", [("read", {"path": "a.py", "lines": [1, 2]})]),
        ("", "Done.", []),
    ]
