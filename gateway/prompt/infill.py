"""Infill: combine prompt and suffix into a prompt whose completion belongs between them."""

from dataclasses import dataclass

from tokenizers import Tokenizer

from gateway.prompt.tokenizers import PromptEncoder
from gateway.prompt.window import Layout

_PROBE = "☺"
"""A character that merges with no following character."""
_SPACES = ("▁", "Ġ")
"""The prefixes of a first token that show that the tokenizer put a space before the text."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Texts of the tokens that mark the parts, as in the training data of a model family."""

    prefix: str
    suffix: str
    middle: str | None
    """None if the suffix comes first and the completion follows the prefix."""


_FAMILIES = (
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    # DeepSeek Coder marks the position of the hole and the end of the text.
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - its own letters
    _Family("[PREFIX]", "[SUFFIX]", None),  # Codestral
)


@dataclass(frozen=True, slots=True)
class InfillTemplate:
    """Ids of the tokens that mark prefix, suffix and middle."""

    prefix_id: int
    suffix_id: int
    middle_id: int | None
    """None if the suffix comes first and the completion follows the prefix."""

    def layout(self, encoder: PromptEncoder, prefix: str, suffix: str, *, begins: bool) -> Layout:
        """Return a prompt whose continuation belongs between the texts; the prefix may be cut.

        With `begins`, it starts with a begin-of-text token if the model's prompts do.
        """
        begin = encoder.begin_ids() if begins else []
        prefix_ids = encoder.text_ids(prefix, adds_special_tokens=False)
        suffix_ids = _continuation_ids(encoder, suffix)
        if self.middle_id is None:
            return Layout([*begin, self.suffix_id, *suffix_ids, self.prefix_id], prefix_ids, [])
        return Layout(
            [*begin, self.prefix_id], prefix_ids, [self.suffix_id, *suffix_ids, self.middle_id]
        )


def find_template(tokenizer: Tokenizer) -> InfillTemplate | None:
    """Return the infill template for a tokenizer, or None if it lacks the infill tokens."""
    for family in _FAMILIES:
        prefix, suffix = (
            tokenizer.token_to_id(family.prefix),
            tokenizer.token_to_id(family.suffix),
        )
        if prefix is None or suffix is None:
            continue
        if family.middle is None:
            return InfillTemplate(prefix, suffix, None)
        middle = tokenizer.token_to_id(family.middle)
        if middle is not None:
            return InfillTemplate(prefix, suffix, middle)
    return None


def _continuation_ids(encoder: PromptEncoder, text: str) -> list[int]:
    """Return the token ids of a text that follows another text.

    Some tokenizers put a space before every text, which would separate the suffix from the text
    before it.
    """
    ids = encoder.text_ids(text, adds_special_tokens=False)
    if not _puts_space_before(encoder.tokenizer):
        return ids
    probe = encoder.text_ids(_PROBE, adds_special_tokens=False)
    probed = encoder.text_ids(_PROBE + text, adds_special_tokens=False)
    return probed[len(probe) :] if probed[: len(probe)] == probe else ids


def _puts_space_before(tokenizer: Tokenizer) -> bool:
    tokens = tokenizer.encode("a", add_special_tokens=False).tokens
    return bool(tokens) and tokens[0].startswith(_SPACES)
