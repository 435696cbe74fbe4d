"""Chat template arguments: template variables that a client sets besides the messages."""

import re
from collections.abc import Set as AbstractSet
from typing import Any, Final, Literal

from pydantic import Field

from gateway.dialects.chat.thinking import Thinking
from gateway.dialects.fields import Parameters
from gateway.dialects.json_types import schema_of
from gateway.dialects.request import SWITCHES, ChatRequest
from gateway.records.errors import invalid, must, shown, unsupported

MAX_ARGUMENTS = 32
MAX_ARGUMENT_CHARACTERS = 1024
MAX_ARGUMENT_NUMBER = 2**63

DEFAULT_VERBOSITY: Final = "medium"

_KWARGS = "chat_template_kwargs"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

RESERVED = frozenset(
    {
        # Set by other parameters or by the model.
        *("add_generation_prompt", "additional_special_tokens", "bos_token", "cls_token"),
        *("continue_final_message", "documents", "eos_token", "mask_token", "messages"),
        *("pad_token", "sep_token", "tools", "unk_token"),
        # Arguments of `apply_chat_template` itself, not of the template.
        *("chat_template", "conversation", "padding", "return_assistant_tokens_mask"),
        *("return_dict", "return_tensors", "tokenize", "truncation"),
        # Functions of templates.
        *("cycler", "dict", "joiner", "lipsum", "namespace", "raise_exception", "range"),
        "strftime_now",
    }
)
"""Variables that clients cannot set through `chat_template_kwargs`."""

KWARGS_SCHEMA: Final = schema_of(
    f"dict[name, str[:{MAX_ARGUMENT_CHARACTERS}] | "
    f"float[-{MAX_ARGUMENT_NUMBER}:{MAX_ARGUMENT_NUMBER}] | bool | None, :{MAX_ARGUMENTS}] | None",
    name={"pattern": f"^{_NAME.pattern}$", "not": {"enum": sorted(RESERVED)}},
)


class TemplateParameters(Parameters):
    """How the messages are rendered to a prompt."""

    chat_template_kwargs: Any = Field(
        default=None,
        description="Variables of the model's chat template, such as `enable_thinking`: numbers, "
        f"booleans and strings of at most {MAX_ARGUMENT_CHARACTERS} characters. Variables that the "
        "template does not read have no effect.",
        json_schema_extra=KWARGS_SCHEMA,
    )
    verbosity: Literal["low", "medium", "high"] | None = None
    """Length of the response: sets the variable `verbosity` of the chat template, if it reads it;
    otherwise no effect. Default: the template's."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of a new assistant message; false is supported
    only with `continue_final_message`. Default: true, unless the last message is continued."""
    continue_final_message: bool | None = None
    """Whether the response continues the last message, which must be an assistant message; the same
    as `partial` in that message. Default: false; dialect llamacpp: true if the last message is an
    assistant message with text."""


def read_template_arguments(
    body: TemplateParameters, thinking: Thinking
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the template's variables, and the parameter that set each of them.

    `chat_template_kwargs` wins if the reasoning parameters have another value for
    `enable_thinking`. Raises a BadRequestError.
    """
    given = read_template_kwargs(body.chat_template_kwargs)
    arguments: dict[str, Any] = {}
    params: dict[str, str] = {}
    if thinking.is_enabled is not None:
        arguments |= dict.fromkeys(SWITCHES, thinking.is_enabled)
        params |= dict.fromkeys(SWITCHES, thinking.switch_param)
    if thinking.effort is not None:
        arguments["reasoning_effort"] = thinking.effort
        params["reasoning_effort"] = thinking.effort_param
        _check_equal("reasoning_effort", thinking.effort, given)
    if body.verbosity is not None:
        arguments["verbosity"] = body.verbosity
        if body.verbosity != DEFAULT_VERBOSITY:
            # OpenAI's default requests nothing, so it is not named as having no effect.
            params["verbosity"] = "verbosity"
        _check_equal("verbosity", body.verbosity, given)
    params |= {name: f"{_KWARGS}.{name}" for name in given}
    return arguments | given, params


def read_continues_last(
    body: TemplateParameters, *, has_partial: bool, by_default: bool = False
) -> bool:
    """Return whether the response continues the last message. Raises a BadRequestError.

    `by_default`: whether it does if no parameter specifies it.
    """
    continues = bool(body.continue_final_message) or has_partial
    if by_default and body.continue_final_message is None and body.add_generation_prompt is None:
        continues = True
    if continues and body.continue_final_message is False:
        raise invalid(
            "continue_final_message", "must not be false if the last message has 'partial'."
        )
    if continues and body.add_generation_prompt:
        raise invalid("add_generation_prompt", "must not be true if the last message is continued.")
    if not continues and body.add_generation_prompt is False:
        raise unsupported(
            "add_generation_prompt", "false is only supported with 'continue_final_message'."
        )
    return continues


def unread_parameters(chat: ChatRequest, variables: AbstractSet[str]) -> list[str]:
    """Return the parameters that set template variables without effect on this template.

    `variables` are the variables that the template reads.
    """
    params = chat.argument_params
    effective = {param for name, param in params.items() if name in variables}
    return sorted(set(params.values()) - effective)


def read_template_kwargs(value: object) -> dict[str, Any]:
    """Return the variables in `chat_template_kwargs`. Raises a BadRequestError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise must(_KWARGS, "be an object", value)
    if len(value) > MAX_ARGUMENTS:
        raise must(_KWARGS, f"have at most {MAX_ARGUMENTS} entries", len(value))
    for name, argument in value.items():
        _check(name, argument)
    return {name: argument for name, argument in value.items() if argument is not None}


def _check(name: str, argument: object) -> None:
    if not _NAME.fullmatch(name):
        raise must(_KWARGS, "have names of 1 to 64 letters, digits or '_', no digit first", name)
    path = f"{_KWARGS}.{name}"
    if name in RESERVED:
        raise unsupported(path, "cannot be set. The request or the model determines it.")
    if isinstance(argument, str):
        if len(argument) > MAX_ARGUMENT_CHARACTERS:
            raise invalid(
                path,
                f"must have at most {MAX_ARGUMENT_CHARACTERS} characters. Given: {len(argument)} "
                "characters.",
            )
    elif not isinstance(argument, bool | int | float | None):
        raise must(path, "be a string, a number or a boolean", argument)
    elif argument is not None and abs(argument) > MAX_ARGUMENT_NUMBER:
        raise must(path, "be a number from -2^63 to 2^63", argument)


def _check_equal(name: str, value: str, given: dict[str, Any]) -> None:
    """Raise InvalidParameterError if `chat_template_kwargs` has another value of a parameter."""
    if (argument := given.get(name, value)) != value:
        path = f"{_KWARGS}.{name}"
        raise invalid(
            path, f"and '{name}' must be equal. Given: {shown(argument)} and {shown(value)}."
        )
