"""The formats in which models write calls, by vLLM's names of their parsers.

Marks of a format are tokens of the model, or spelled out if its tokenizer lacks them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from contract.grammar import HERMES_PARSERS
from gateway.completions.structure import lark
from gateway.completions.structure.splitting import within


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How calls are written: `opening`, `before`, the name, `between`, the arguments, `after`."""

    opening: str
    """A mark or a text that begins a call, and that free text must not contain."""
    before: str = ""
    between: str = ""
    after: str = ""
    separator: str = ""
    """Between two calls, as a Lark expression."""
    end: str = ""
    """Ends all calls. If there is an end, one opening begins them all."""
    begins_response: bool = False
    """Whether calls are found only at the beginning of a response."""
    has_elements: bool = False
    """Whether each argument is an element `<parameter=NAME>`, not JSON."""


def _deepseek(words: str) -> str:
    """Return a mark of DeepSeek's models, with their own bars and blanks."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


HERMES: Final = CallFormat(opening="<tool_call>", separator=r"/\n?/")
"""`tools` has the rest, which permits more white space."""
_ELEMENTS: Final = CallFormat(
    opening="<tool_call>",
    before="\n<function=",
    between=">\n",
    after="</function>\n</tool_call>",
    separator=r'"\n"',
    has_elements=True,
)
_LLAMA: Final = CallFormat(
    opening='{"name": "',
    between='", "parameters": ',
    after="}",
    separator='"; "',
    begins_response=True,
)
MISTRAL: Final = CallFormat(opening="[TOOL_CALLS]", between="[ARGS]", after="")
_DEEPSEEK: Final = CallFormat(
    opening=_deepseek("tool calls begin"),
    before=_deepseek("tool call begin"),
    between=_deepseek("tool sep"),
    after=_deepseek("tool call end"),
    end=_deepseek("tool calls end"),
)
_OLD_DEEPSEEK: Final = CallFormat(
    opening=_DEEPSEEK.opening,
    before=f"{_DEEPSEEK.before}function{_DEEPSEEK.between}",
    between="\n```json\n",
    after=f"\n```{_DEEPSEEK.after}",
    separator=r'"\n"',
    end=_DEEPSEEK.end,
)
FORMATS: Final[Mapping[str, CallFormat]] = {
    **dict.fromkeys(HERMES_PARSERS, HERMES),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), _ELEMENTS),
    **dict.fromkeys(("llama3_json", "llama4_json"), _LLAMA),
    "mistral": MISTRAL,
    "deepseek_v3": _OLD_DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
}

_MARK: Final = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])")
_TAGS: Final = r"(<parameter=|<\/function>|<\/parameter>(.|\n)+)"
"""What would end the text of an element early."""
_END_OF_ELEMENT: Final = "\n</parameter>\n"
_ANY_NAME: Final = r"/[^<>\n]+/"
_NO_STRINGS: Final = ("null", "boolean", "integer", "number", "array", "object")


def texts(text: str, token_ids: lark.TokenIds) -> str:
    """Return a match for a text with marks."""
    parts = [part for part in _MARK.split(text) if part]
    return " ".join(lark.mark(part, token_ids) for part in parts)


class Elements:
    """The arguments of one tool as elements.

    Args:
        schema: The closed schema of the arguments.
        prefix: Begins the names of the rules.
    """

    def __init__(self, schema: dict[str, Any], prefix: str) -> None:
        self._schema = schema
        self._prefix = prefix
        self._texts: dict[str, str] = {}
        """Names of the rules for texts, by what is kept."""
        self.unenforced: list[str] = []
        """Paths of what elements cannot enforce."""

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules to which the expression refers."""
        return tuple(
            rule
            for kept, name in self._texts.items()
            for rule in (
                f"{name}[lazy]: {name.upper()}",
                rf"{name.upper()}: /{kept}\n<\/parameter>/ & ~/(.|\n)*{_TAGS}(.|\n)*/",
            )
        )

    def expression(self) -> str:
        """Return the grammar of all elements."""
        schema = self._schema
        parts = []
        required = schema.get("required", ())
        for name, each in schema.get("properties", {}).items():
            if each is False or not re.fullmatch(r"[^<>\n]+", name):
                self.unenforced += [within(".properties", name)] * (name in required)
                continue
            element = f"({lark.literal(f'<parameter={name}>')} {self._value(each, name)})"
            parts.append(element if name in required else f"{element}?")
        others = schema.get("additionalProperties", True)
        if any(keyword in schema for keyword in ("anyOf", "oneOf", "allOf", "$ref")):
            self.unenforced.append("")
            parts, others = [], True
        if others is not False:
            value = self._value(others, "*")
            parts.append(f'("<parameter=" {_ANY_NAME} ">" {value})*')
        return " ".join(parts) or lark.literal("")

    def _value(self, schema: Any, name: str) -> str:
        """Return the grammar of an element's value and end."""
        end = lark.literal(_END_OF_ELEMENT)
        schema = self._resolved(schema)
        options = (
            [{**schema, "type": each} for each in schema["type"]]
            if isinstance(schema.get("type"), list)
            else schema.get("anyOf", [schema])
        )
        found = []
        for option in map(self._resolved, options):
            values = [option["const"]] if "const" in option else option.get("enum")
            if values is not None:
                strings = [lark.literal(each) for each in values if isinstance(each, str)]
                others = [each for each in values if not isinstance(each, str)]
                found += [f"({' | '.join(strings)}) {end}"] * bool(strings)
                found += [f"{lark.json_value({'enum': others})} {end}"] * bool(others)
            elif option.get("type") in _NO_STRINGS:
                definitions = {"$defs": self._schema["$defs"]} if "'$ref'" in str(option) else {}
                found.append(f"{lark.json_value({**option, **definitions})} {end}")
            else:
                found.append(self._text(option, name))
        return f'"\\n" ({" | ".join(dict.fromkeys(found))})'

    def _text(self, schema: dict[str, Any], name: str) -> str:
        """Return the grammar of a text and of the element's end."""
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        kept = f"(?s:.{{{least},{most}}})" if least or most != "" else "(?s:.*)"
        paths = sorted(schema.keys() - {"type", "minLength", "maxLength"})
        place = within(".properties", name)
        self.unenforced += (within(place, keyword) for keyword in paths)
        rule = self._texts.setdefault(kept, f"{self._prefix}_{len(self._texts)}")
        return rf'{rule} "\n"'

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """Return a schema without a reference in its first level."""
        if not isinstance(schema, dict):
            return {}
        target = self._schema.get("$defs", {}).get(str(schema.get("$ref")).rpartition("/")[2])
        return target if isinstance(target, dict) else schema
