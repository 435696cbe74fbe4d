"""Prompts by shape, and the parameters that echo, extend or truncate them."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from gateway.dialects.fields import COUNT, Parameters, bounded, typed
from gateway.dialects.parameters import Endpoints
from gateway.dialects.profile import Profile
from gateway.dialects.request import FIT, Prompt
from gateway.dialects.unknown_members import OBJECTS
from gateway.dialects.wire import INTEGRAL
from gateway.records.errors import MissingParameterError, invalid, must

_TEXT = "prompt_string"
_IDS = "list[int[0:]]"
_OBJECT = f'{{"{_TEXT}": str}}'


class TruncationSide(StrEnum):
    """The end of a prompt at which truncation removes tokens."""

    LEFT = "left"  # The last tokens are kept.
    RIGHT = "right"  # The first tokens are kept.


class TruncationParameters(Parameters):
    """How a prompt that is too long is truncated."""

    truncate_sequence: bool | None = None
    """Whether to cut the first tokens of a prompt that is too long, so that max_tokens fit, instead
    of rejecting it. Default: false."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=COUNT.maximum), INTEGRAL] | None = None
    """Keep this many of the prompt's last tokens; -1 keeps all that fit, like `truncate_sequence`.
    Default: keep all, and reject a prompt that is too long."""
    truncation_side: Annotated[TruncationSide, Field(strict=False)] | None = None
    """Which tokens `truncate_prompt_tokens` and `truncate_sequence` remove: `left` the first ones,
    `right` the last ones. Default: left."""


class PromptParameters(TruncationParameters):
    """The start of the completion."""

    prompt: Annotated[
        Any,
        typed(
            f"str | list[str] | {_IDS} | list[{_IDS}] | list[str | int] | {_OBJECT} | "
            f"list[str | {_IDS} | {_OBJECT}]"
        ),
    ] = None
    """Text, a list of token ids, a list that mixes both, llama.cpp's `{prompt_string}`, or a list
    of such prompts. Required except in dialect openai, whose default is the model's begin-of-text
    token."""
    add_special_tokens: bool | None = None
    """Whether to add the tokenizer's own tokens, such as begin-of-text, to text prompts. Default:
    true."""
    suffix: str | None = None
    """Text that follows the completion (infill); the model must have infill tokens. In dialect
    mistralrs: text to append to every choice."""
    echo: bool | None = None
    """Return the prompt before the completion. Default: false."""
    echo_last: Annotated[int, bounded(COUNT), INTEGRAL] | None = None
    """Return only this many of the prompt's last tokens before the completion; 0: none. Default:
    all, if `echo`."""


def read_prompts(body: PromptParameters, profile: Profile, *, max_prompts: int) -> list[Prompt]:
    """Return the prompts, according to the shape of `prompt` (docs/api.md).

    There is one prompt or several, at most `max_prompts`. Raises a BadRequestError.
    """
    value = body.prompt
    if value is None:
        if not profile.allows_missing_prompt:
            raise MissingParameterError("prompt")
        return [""]
    # A list may have millions of entries, so collect their types without a Python loop.
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds.isdisjoint((list, dict)) and kinds != {str}:
        return [_one_prompt(value, "prompt")]
    if len(value) > max_prompts:
        raise invalid(
            "prompt", f"must have at most {max_prompts} prompts. Given: {len(value)} prompts."
        )
    return [_one_prompt(item, f"prompt[{index}]") for index, item in enumerate(value)]


def _one_prompt(value: object, path: str) -> Prompt:
    if isinstance(value, dict):
        others: list[str] = []
        OBJECTS[Endpoints.COMPLETIONS]["prompt"].check(value, path, others)
        if others or not isinstance(value.get(_TEXT), str):
            raise must(path, f"have only the text '{_TEXT}'", value, param="prompt")
        value = value[_TEXT]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise must(path, "be a string or an array of token ids", value, param="prompt")
    if not value:
        raise invalid(path, "must not be empty.", param="prompt")
    if not set(map(type, value)) <= {int, str}:
        position = next(i for i, piece in enumerate(value) if type(piece) not in {int, str})
        raise must(
            f"{path}[{position}]", "be a token id or a string", value[position], param="prompt"
        )
    return value


def read_prompt_tokens_kept(body: TruncationParameters) -> int | None:
    """Return how many of the prompt's tokens are kept, FIT, or None for no truncation."""
    if body.truncate_prompt_tokens is None:
        return FIT if body.truncate_sequence else None
    if body.truncate_prompt_tokens == 0:
        raise must("truncate_prompt_tokens", "be at least 1, or -1", 0)
    return body.truncate_prompt_tokens


def keeps_prompt_start(body: TruncationParameters) -> bool:
    """Return whether truncation keeps the first tokens of a prompt, and not the last ones."""
    return body.truncation_side is TruncationSide.RIGHT


def unused_truncation(body: TruncationParameters) -> list[str]:
    """Return the parameters of truncation that have no effect without the others."""
    is_unused = keeps_prompt_start(body) and read_prompt_tokens_kept(body) is None
    return ["truncation_side"] if is_unused else []


def read_echo(body: PromptParameters) -> tuple[bool, int | None]:
    """Return whether the prompt is echoed, and how many of its last tokens (None: all)."""
    if body.echo_last is None:
        return bool(body.echo), None
    if body.echo_last == 0:
        return False, None
    return True, body.echo_last


def read_suffix(
    body: PromptParameters, profile: Profile, prompts: list[Prompt], *, has_images: bool
) -> str:
    """Return the suffix, or an empty string without one.

    Raises InvalidParameterError where infill is impossible.
    """
    suffix = body.suffix or ""
    if not suffix or profile.is_suffix_literal:
        return suffix
    if read_echo(body)[0]:
        raise invalid("suffix", "cannot be combined with 'echo'.")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise invalid("suffix", "requires prompts of text, not of token ids.")
    if has_images:
        raise invalid("suffix", "cannot be combined with 'images'.")
    return suffix
