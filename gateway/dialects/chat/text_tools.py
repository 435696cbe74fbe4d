"""Custom tools of OpenAI's APIs: a call has a free text, which a grammar may describe.

The model sees a tool as a function with one argument, which is the text.
"""

from typing import Any, Final

from contract.messages import TEXT_ARGUMENT
from gateway.dialects.chat.messages import read_object, read_text
from gateway.dialects.fields import non_empty
from gateway.dialects.request import Structure, StructureKind, Tool
from gateway.records.errors import must

_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {TEXT_ARGUMENT: {"type": "string"}},
    "required": [TEXT_ARGUMENT],
    "additionalProperties": False,
}
_SYNTAXES: Final = {"lark": StructureKind.LARK, "regex": StructureKind.REGEX}


def read_text_tool(tool: dict[str, Any], path: str, name: str) -> tuple[Tool, dict[str, Any]]:
    """Return the tool at a place under this name, and its description for the template.

    Raises a BadRequestError.
    """
    form = read_object(tool.get("format") or {"type": "text"}, f"{path}.format")
    about = [read_text(tool, "description", path), f"'{TEXT_ARGUMENT}' is a free text."]
    grammar = None
    match form.get("type"):
        case "text":
            pass
        case "grammar":
            within = "format"
            if form.get("grammar") is not None:  # The form of chats.
                within = "format.grammar"
                form = read_object(form["grammar"], f"{path}.{within}")
            syntax, definition = form.get("syntax"), form.get("definition")
            if not isinstance(syntax, str) or syntax not in _SYNTAXES:
                raise must(f"{path}.{within}.syntax", f"be one of {', '.join(_SYNTAXES)}", syntax)
            place = f"{path}.{within}.definition"
            definition = non_empty(definition, place)
            param, bracket, rest = place.partition("[")
            grammar = Structure(_SYNTAXES[syntax], definition, param, bracket + rest)
            about.append(f"It must match this grammar ({syntax}):\n{definition}")
        case kind:
            raise must(f"{path}.format.type", "be text or grammar", kind)
    description = "\n".join(filter(None, about))
    function = {"name": name, "description": description, "parameters": _PARAMETERS}
    # The schema is not the client's: an error about it would have no place.
    read = Tool(name, _PARAMETERS, is_strict=False, place=path, grammar=grammar)
    return read, {"type": "function", "function": function}
