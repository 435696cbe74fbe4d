"""Infill: combine prompt and suffix into a prompt whose completion belongs between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tokenizers import Tokenizer

from gateway.completions.prompt.tokenizers import PromptEncoder
from gateway.completions.prompt.window import Layout

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
    _Family("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    _Family("[PREFIX]", "[SUFFIX]", None),  # Codestral
)


_REPOSITORY_MARKS = (
    ("<|repo_name|>", "<|file_sep|>"),  # Qwen Coder
    ("<reponame>", "<file_sep>"),  # Granite Code
    ("<repo_name>", "<file_sep>"),  # StarCoder 2
)
"""Texts of the tokens before the name of a repository and before each of its files."""
_PROJECT = "myproject\n"
_CURRENT_FILE = "filename\n"
_SEPARATOR = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True, slots=True)
class InfillTemplate:
    """Ids of the tokens that mark prefix, suffix and middle."""

    prefix_id: int
    suffix_id: int
    middle_id: int | None
    """None if the suffix comes first and the completion follows the prefix."""
    repository_id: int | None = None
    """The token before the name of a repository; None if the model has no tokens for them."""
    file_id: int = 0
    """The token before each of its files."""

    def layout(
        self,
        encoder: PromptEncoder,
        prefix: str,
        suffix: str,
        *,
        begins: bool,
        files: Sequence[tuple[str, str]] | None = None,
    ) -> Layout:
        """Return a prompt whose continuation belongs between the texts; the prefix may be cut.

        `encoder` determines whether the texts can have special tokens. With `begins`, the prompt
        starts with a begin-of-text token if the model's prompts do. Names and texts of `files`
        precede the prefix, as in llama.cpp; None is not the same as no files.
        """
        begin = encoder.begin_ids() if begins else []
        prefix_ids = encoder.text_ids(prefix, adds_special_tokens=False)
        suffix_ids = _continuation_ids(encoder, suffix)
        if files is not None:
            begin += self._file_ids(encoder, files)
        if self.middle_id is None:
            return Layout([*begin, self.suffix_id, *suffix_ids, self.prefix_id], prefix_ids, [])
        return Layout(
            [*begin, self.prefix_id], prefix_ids, [self.suffix_id, *suffix_ids, self.middle_id]
        )

    def _file_ids(self, encoder: PromptEncoder, files: Sequence[tuple[str, str]]) -> list[int]:
        """Return the token ids of the files before the prefix.

        If the model has tokens for a repository, the files are named and the prefix belongs to
        another file of the repository, even without files. Other models get the texts with
        separators.
        """
        if self.repository_id is None:
            texts = "".join(_SEPARATOR + text for _, text in files)
            return encoder.text_ids(texts, adds_special_tokens=False)
        ids = [self.repository_id, *_continuation_ids(encoder, _PROJECT)]
        for text in (*(f"{name}\n{text}" for name, text in files), _CURRENT_FILE):
            ids += (self.file_id, *_continuation_ids(encoder, text))
        return ids


@lru_cache(maxsize=64)
def find_template(tokenizer: Tokenizer) -> InfillTemplate | None:
    """Return the infill template for a tokenizer, or None if it lacks the infill tokens."""
    for family in _FAMILIES:
        prefix, suffix = map(tokenizer.token_to_id, (family.prefix, family.suffix))
        middle = None if family.middle is None else tokenizer.token_to_id(family.middle)
        if prefix is None or suffix is None or (middle is None and family.middle is not None):
            continue
        for marks in _REPOSITORY_MARKS:
            repository, file = map(tokenizer.token_to_id, marks)
            if repository is not None and file is not None:
                return InfillTemplate(prefix, suffix, middle, repository, file)
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
