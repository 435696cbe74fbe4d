"""Responses in the formats of many models, and their way into parsers."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream
from typing_extensions import override

from contract.messages import CallPiece, Parsing
from contract.outcomes import FinishReason
from tests.worker.conftest import MODEL_FOLDER
from worker.parsing.base import Parsed, Parser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "opts": {"type": "object"},
                },
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "parameters": {
                "type": "object",
                "properties": {"q": {"type": "string"}, "ok": {"type": "boolean"}},
            },
        },
    },
]
PARSING = Parsing(tools=TOOLS, finds_reasoning=True)

WEATHER = {
    "city": 'São "Paulo" {x}',
    "days": 3,
    "opts": {"unit": "°C", "list": ["a, b", "]}"]},
}
LOOKUP = {"q": "x\ny", "ok": True}
CALLS = [("get_weather", WEATHER), ("lookup", LOOKUP)]

REASONING = "let me see — ok 日本"
THINK = f"<think>{REASONING}</think>\n\n"
SPECIAL = """
<arg_key> </arg_key> <arg_value> </arg_value> <tool_response> </tool_response>
[TOOL_CALLS] [ARGS] [CALL_ID] [TOOL_CONTENT] <|python_tag|> <|tool_call|>
<|tool_calls_section_begin|> <|tool_calls_section_end|>
<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>
<|im_start|> <|im_end|> <|endoftext|>
"""


def _deepseek_mark(name: str) -> str:
    return f"<\uff5ctool\u2581{name}\uff5c>"


CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR = map(
    _deepseek_mark,
    ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep"),
)


@dataclass(frozen=True)
class Case:
    """A response with two calls, as the model of a parser writes it."""

    tool: str
    reasoning: str
    text: str
    calls: int = 2

    @override
    def __str__(self) -> str:
        return f"{self.tool}+{self.reasoning}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def named_calls(arguments: str) -> list[str]:
    """Return CALLS as JSON with `name`, and the arguments under a given name."""
    return [f'{{"name": "{name}", "{arguments}": {_json(values)}}}' for name, values in CALLS]


def _text(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _xml(name: str, values: dict[str, object]) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in values.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _glm(name: str, values: dict[str, object]) -> str:
    parameters = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
        for key, value in values.items()
    )
    return f"<tool_call>{name}\n{parameters}</tool_call>"


def _deepseek(lead: str, end: str) -> str:
    calls = "".join(
        f"{CALL_BEGIN}{lead.format(name)}{_json(values)}{end}{CALL_END}" for name, values in CALLS
    )
    return f"{CALLS_BEGIN}{calls}{CALLS_END}"


def _kimi() -> str:
    calls = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_json(values)}"
        "<|tool_call_end|>"
        for index, (name, values) in enumerate(CALLS)
    )
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


HERMES = "I will look.\n" + "\n".join(
    f"<tool_call>\n{call}\n</tool_call>" for call in named_calls("arguments")
)
_XML = "ok \n" + "\n".join(_xml(name, dict(values)) for name, values in CALLS)
_GLM = "ok\n" + "\n".join(_glm(name, dict(values)) for name, values in CALLS)
_MISTRAL = "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(values)}" for name, values in CALLS)

CASES = [
    Case("hermes", "", HERMES),
    Case("qwen3_json", "qwen3", THINK + HERMES),
    Case("hermes", "deepseek_r1", THINK + HERMES),
    Case("qwen3_coder", "", _XML),
    Case("qwen3_xml", "qwen3", THINK + _XML),
    Case("llama3_json", "", "; ".join(named_calls("parameters"))),
    Case("mistral", "", _MISTRAL),
    Case("granite", "", f"<|tool_call|>[{', '.join(named_calls('arguments'))}]"),
    Case(
        "pythonic", "",
        f"[get_weather(city={WEATHER['city']!r}, days=3, opts={WEATHER['opts']!r}), "
        "lookup(q='x\\ny', ok=True)]",
    ),
    Case("glm45", "glm45", THINK + _GLM),
    Case("kimi_k2", "kimi_k2", THINK + "ok" + _kimi()),
    Case("deepseek_v3", "", "hello" + _deepseek(f"function{SEPARATOR}{{}}\n```json\n", "\n```")),
    Case("deepseek_v31", "deepseek_v3", "hello" + _deepseek(f"{{}}{SEPARATOR}", "")),
    Case("hermes", "step3p5", THINK + HERMES),
    Case("qwen3_xml", "mimo", THINK + _XML),
    Case("qwen3_coder", "nemotron_v3", THINK + _XML),
    Case("", "deepseek_r1", THINK + "The answer is <b>4</b>.", calls=0),
    Case("", "qwen3", THINK + "The answer is <b>4</b>.", calls=0),
]  # fmt: skip


def make_tokenizer() -> Tokenizer:
    """Return the demo model's tokenizer with the marks of all these formats."""
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    marks = [*SPECIAL.split(), CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR]
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in marks]
    )
    return tokenizer


def tokens_of(tokenizer: Tokenizer, text: str) -> list[tuple[int, str]]:
    """Return the tokens of a text, each with the text that it completes, and the end of text."""
    stream = DecodeStream(skip_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    tokens = [(token_id, stream.step(tokenizer, token_id) or "") for token_id in ids]
    return [*tokens, (tokenizer.encode("</s>").ids[0], "")]


def read(parser: Parser, tokens: Iterable[tuple[int, str]]) -> list[Parsed]:
    """Feed tokens one by one, and return the pieces that each adds."""
    return [plain(parser.feed(token_id, text)) for token_id, text in tokens]


def plain(parsed: Parsed) -> Parsed:
    """Return it in a comparable form."""
    return parsed._replace(calls=[each for each in parsed.calls if each.name or each.arguments])


@dataclass
class Whole:
    """A joined response."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    reasoning_tokens: int


def whole(parts: Sequence[Parsed]) -> Whole:
    """Join the pieces of all tokens."""
    calls: dict[int, CallPiece] = {}
    for piece in (each for part in parts for each in part.calls):
        before = calls.get(piece.index, CallPiece(piece.index))
        assert not (piece.name and before.name), "the name comes once"
        calls[piece.index] = CallPiece(
            piece.index, before.name + piece.name, before.arguments + piece.arguments
        )
    assert list(calls) == list(range(len(calls)))
    return Whole(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        [(each.name, each.arguments) for each in calls.values()],
        sum(part.is_reasoning for part in parts),
    )


def read_whole(
    parser: Parser, tokens: Iterable[tuple[int, str]], reason: FinishReason = FinishReason.STOP
) -> Whole:
    """Parse a response to its end."""
    parts = read(parser, tokens)
    return whole([*parts, parser.finish(reason)])
