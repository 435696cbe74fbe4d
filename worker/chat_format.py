"""The chat format of a model, as far as its chat templates show it without an engine.

A model has one template, or a second one for conversations with tools (`tool_use`) next to its
`default`.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from typing_extensions import override

from contract.grammar import ENFORCED_PARSERS
from contract.messages import ChatFormat, ContentFormat

_log = logging.getLogger(__name__)

Templates = Mapping[str, str]
"""Jinja sources by template name."""

DEFAULT = "default"
TOOL_USE = "tool_use"
MAX_TEMPLATE_CHARACTERS = 500_000

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserFormat:
    """What the parsers of a model's responses look for."""

    tool_parser: str = ""
    """Name of the tool parser; empty if calls are not parsed."""
    reasoning_parser: str = ""
    """Name of the reasoning parser; empty if reasoning is not separated from content."""
    reasoning_start: str = ""
    reasoning_end: str = ""
    """Texts of the tokens around reasoning; both empty unless each is a single token."""
    shows_special_tokens: bool = False
    """Whether the parsers look for special tokens."""

    @property
    def has_enforced_calls(self) -> bool:
        """Whether the gateways' grammars can enforce the calls."""
        return self.tool_parser in ENFORCED_PARSERS


def chat_format(
    templates: Templates, special_tokens: dict[str, str], parsers: ParserFormat
) -> ChatFormat | None:
    """Return the chat format of a model; None if it has no template that compiles."""
    if not templates:
        return None
    try:
        formats = {content_format(source) for source in templates.values()}
    except ValueError as error:
        _log.warning("Chats are disabled, because the chat template is invalid: %s", error)
        return None
    if len(formats) > 1:
        _log.warning("The model's chat templates expect different content formats; using strings")
    return ChatFormat(
        template_digest=digest(templates),
        content_format=ContentFormat.STRING if len(formats) > 1 else formats.pop(),
        special_tokens=special_tokens,
        **asdict(parsers),
    )


def folder_templates(folder: Path) -> dict[str, str]:
    """Return the templates in a model folder; none if it has none."""
    if (file := folder / "chat_template.jinja").is_file():
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return {DEFAULT: _read(file), **{each.stem: _read(each) for each in more}}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if found := _templates_within(_read_json(folder / name).get("chat_template")):
            return found
    return {}


def given_template(path: Path) -> dict[str, str]:
    """Return the template in a file that replaces the model's own. Raise ValueError if invalid."""
    try:
        source = _read(path)
        content_format(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"chat_template: {path} cannot be used: {error}") from None
    return {DEFAULT: source}


def content_format(source: str) -> ContentFormat:
    """Return the content format that a template expects: parts if it iterates over the content.

    Detects the format as vLLM does, so that templates receive messages in the same form. Raises
    ValueError for a template that is too long or does not compile.
    """
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise ValueError(
            f"It must have at most {MAX_TEMPLATE_CHARACTERS} characters. Given: {len(source)}"
        )
    try:
        is_walked = any(_loops_over_content(_environment.parse(source)))
    except TemplateSyntaxError as error:
        raise ValueError(f"Line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise ValueError("It is nested too deeply.") from None
    return ContentFormat.PARTS if is_walked else ContentFormat.STRING


def published(templates: Templates) -> bytes:
    """Return templates as canonical JSON for publishing."""
    return json.dumps(dict(templates), ensure_ascii=False, sort_keys=True).encode()


def digest(templates: Templates) -> str:
    """Return the SHA-256 digest under which templates are published."""
    return hashlib.sha256(published(templates)).hexdigest()


def folder_special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens from tokenizer_config.json that templates refer to by name."""
    config = _read_json(folder / "tokenizer_config.json")
    tokens = {name: _text_of(config.get(name)) for name in _SPECIAL_TOKENS}
    return {name: text for name, text in tokens.items() if text}


def _text_of(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _templates_within(value: Any) -> dict[str, str]:
    """Return the templates in a configuration: one, or several by name."""
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list):
        return {each["name"]: each["template"] for each in value}
    return dict(value or {})


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_read(path)) if path.is_file() else {}
    return content


# --- how a template iterates over messages --------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}`, which marks training text in templates and does not change the output."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    @override
    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_environment = SandboxedEnvironment(  # Nothing is rendered here.
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)


def _loops_over_content(template: nodes.Template) -> Iterator[nodes.For]:
    messages = set(_message_names(template))
    within_macros = {}
    for macro in template.find_all(nodes.Macro):
        names = _content_parameters(template, macro, messages)
        within_macros.update({id(loop): names for loop in macro.find_all(nodes.For)})
    for loop in template.find_all(nodes.For):
        # Outside of macros, a variable named content is assumed to be that of a message.
        names = within_macros.get(id(loop), {"content"})
        is_name = isinstance(loop.iter, nodes.Name) and loop.iter.name in names
        if is_name or _is_content(loop.iter, messages):
            yield loop


def _message_names(template: nodes.Template) -> Iterator[str]:
    """Find the names that loops assign to a message."""
    lists = ["messages"]
    for name in lists:
        for assign in template.find_all(nodes.Assign):
            target = assign.target
            if isinstance(target, nodes.Name) and _is_name(_unwrapped(assign.node), {name}):
                lists += [] if target.name in lists else [target.name]
    for loop in template.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and _is_name(_unwrapped(loop.iter), set(lists)):
            yield loop.target.name


def _content_parameters(
    template: nodes.Template, macro: nodes.Macro, messages: set[str]
) -> set[str]:
    """Find the parameters of a macro that receive the content of a message anywhere."""
    names = [each.name for each in macro.args]
    found = set()
    for call in template.find_all(nodes.Call):
        if not _is_name(call.node, {macro.name}):
            continue
        given = [*zip(names, call.args, strict=False)]
        given += [(each.key, each.value) for each in call.kwargs if each.key in names]
        found |= {name for name, value in given if _is_content(value, messages)}
    return found


def _is_content(node: nodes.Node, messages: set[str]) -> bool:
    node = _unwrapped(node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and _is_name(node.node, messages)
    if not (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const)):
        return False
    return node.arg.value == "content" and _is_name(node.node, messages)


def _is_name(node: nodes.Node, names: set[str]) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


def _unwrapped(node: nodes.Node) -> nodes.Node:
    """Return the expression inside filters, tests and slices."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _unwrapped(node.node)
    if isinstance(node, (nodes.Filter, nodes.Test)) and node.node is not None:
        return _unwrapped(node.node)
    return node
