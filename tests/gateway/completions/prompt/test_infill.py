"""`suffix`: the infill prompt of every family of models."""

import pytest
from tokenizers import Tokenizer

from contract.dialect import Dialect
from gateway.completions.prompt.infill import find_template
from gateway.completions.prompt.preparation import prepare
from gateway.completions.prompt.tokenizers import _literal_copy
from gateway.records.errors import (
    ContextLengthExceededError,
    InvalidParameterError,
    UnsupportedParameterError,
)
from tests.gateway.completions.prompt.building import (
    LETTERS,
    at_once,
    card_of,
    encoder_of,
    letter_tokenizer,
    request_of,
    tiny_tokenizer,
)
from tests.support.cases import all_cases

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
CODELLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")  # noqa: RUF001
CODESTRAL = ("[PREFIX]", "[SUFFIX]")


def filled(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    *,
    begins: bool = True,
    files: list[tuple[str, str]] | None = None,
) -> list[str | None]:
    """Return the tokens between which the model writes."""
    template = find_template(tokenizer)
    assert template is not None
    layout = template.layout(encoder_of(tokenizer), prefix, suffix, begins=begins, files=files)
    return [tokenizer.id_to_token(token) for token in layout.token_ids]


@all_cases("family", [QWEN, STARCODER, DEEPSEEK], ids=["qwen", "star", "deepseek"])
def test_suffix_is_between_prefix_and_middle(family: tuple[str, str, str]) -> None:
    before, hole, end = family
    tokens = filled(letter_tokenizer(*family), "ab", "cd")
    assert tokens == [before, "a", "b", hole, "c", "d", end]


def test_begin_of_text_comes_first_if_the_models_prompts_have_it() -> None:
    tokenizer = letter_tokenizer(*DEEPSEEK, adds_bos=True)
    assert filled(tokenizer, "ab", "c") == [
        "<s>",
        DEEPSEEK[0],
        "a",
        "b",
        DEEPSEEK[1],
        "c",
        DEEPSEEK[2],
    ]
    assert filled(tokenizer, "a", "c", begins=False)[0] == DEEPSEEK[0]
    assert filled(letter_tokenizer(*DEEPSEEK), "a", "c")[0] == DEEPSEEK[0]


def test_code_llama_gets_no_made_up_space_before_the_suffix() -> None:
    tokenizer = letter_tokenizer(*CODELLAMA, adds_bos=True, spaces=True)
    assert filled(tokenizer, "ab", "cd") == [
        *("<s>", "▁<PRE>", "▁", "a", "b", "▁<SUF>", "c", "d", "▁<MID>")
    ]
    assert filled(tokenizer, "ab", " cd")[6:8] == ["▁", "c"]


def test_codestral_gets_the_suffix_first_and_continues_the_prefix() -> None:
    tokenizer = letter_tokenizer(*CODESTRAL, adds_bos=True, spaces=True)
    assert filled(tokenizer, "ab", "cd") == ["<s>", "[SUFFIX]", "c", "d", "[PREFIX]", "▁", "a", "b"]


def test_empty_prefix_adds_no_token() -> None:
    assert filled(letter_tokenizer(*QWEN), "", "c") == [QWEN[0], QWEN[1], "c", QWEN[2]]


def letters(text: str) -> list[str]:
    """Return the tokens of a text; other characters than letters have none."""
    return [letter for letter in text.replace(" ", "▁") if letter in LETTERS]


@all_cases("files", [[], [("a.b", "cd"), ("e", "")]], ids=["none", "two"])
def test_files_of_a_repository_come_before_the_prefix(files: list[tuple[str, str]]) -> None:
    repository, file = marks = ("<|repo_name|>", "<|file_sep|>")
    tokens = filled(letter_tokenizer(*QWEN, *marks), "x", "", files=files)
    named = [token for name, text in files for token in (file, *letters(f"{name}\n{text}"))]
    assert tokens == [
        *(repository, *letters("myproject\n"), *named, file, *letters("filename\n")),
        *(QWEN[0], "x", QWEN[1], QWEN[2]),
    ]


def test_files_without_marks_of_their_own_are_separated_by_text() -> None:
    tokenizer = letter_tokenizer(*CODESTRAL)
    between = letters("\n\n--- snippet ---\n\n")
    tokens = filled(tokenizer, "x", "y", files=[("a", "b"), ("c", "d")])
    assert tokens == [*between, "b", *between, "d", "[SUFFIX]", "y", "[PREFIX]", "x"]


@all_cases(
    "special", [(), QWEN[:2], ("[SUFFIX]",), ("<|fim_prefix|>",)], ids=lambda given: str(len(given))
)
def test_model_without_all_of_a_familys_tokens_has_no_template(special: tuple[str, ...]) -> None:
    assert find_template(letter_tokenizer(*special)) is None


async def test_demo_model_gets_the_infill_format_of_its_training() -> None:
    tokenizer = tiny_tokenizer()
    request = request_of("def add(a, b):\n", suffix="\n    return result")
    card = card_of(tokenizer, context_window=2048)
    [prompt] = (await prepare(request, tokenizer, card, at_once)).prompts
    trained = "<|fim_prefix|>def add(a, b):\n<|fim_suffix|>\n    return result<|fim_middle|>"
    assert list(prompt.token_ids) == tokenizer.encode(trained).ids
    assert prompt.max_tokens == 4


def test_only_the_marks_of_infill_are_special() -> None:
    tokenizer = letter_tokenizer(*QWEN, "<|repo_name|>", "<|file_sep|>", adds_bos=True)
    template = find_template(tokenizer)
    assert template is not None
    literal = encoder_of(_literal_copy(tokenizer, is_inner=False))
    text = f"<s>{QWEN[2]}a"
    layout = template.layout(literal, text, text, begins=True, files=[(text, text)])
    shown = [tokenizer.id_to_token(token) for token in layout.token_ids]
    assert [each for each in shown if each and len(each) > 1] == [
        *("<s>", "<|repo_name|>", "<|file_sep|>", "<|file_sep|>"),
        *QWEN,
    ]


async def test_suffix_is_refused_by_a_model_without_infill_naming_both() -> None:
    tokenizer = letter_tokenizer()
    with pytest.raises(UnsupportedParameterError, match=r"'suffix'.*'m1'") as caught:
        await prepare(request_of("ab", suffix="c"), tokenizer, card_of(tokenizer), at_once)
    assert caught.value.param == "suffix"


async def test_suffix_needs_a_prompt_of_text() -> None:
    tokenizer = letter_tokenizer(*QWEN)
    with pytest.raises(InvalidParameterError, match=r"'prompt\[1\]' must be text"):
        await prepare(request_of("a", [5], suffix="c"), tokenizer, card_of(tokenizer), at_once)


async def test_prefix_is_cut_and_never_the_suffix_or_a_mark() -> None:
    tokenizer = letter_tokenizer(*QWEN)
    request = request_of("abcdefghij", suffix="xyz", prompt_tokens_kept=8)
    prepared = await prepare(request, tokenizer, card_of(tokenizer), at_once)
    tokens = [tokenizer.id_to_token(token) for token in prepared.prompts[0].token_ids]
    assert tokens == [QWEN[0], "i", "j", QWEN[1], "x", "y", "z", QWEN[2]]
    assert prepared.cut_tokens == 8
    with pytest.raises(ContextLengthExceededError, match=r"6 tokens, which .* at most 5") as e:
        await prepare(
            request_of("ab", suffix="xyz", prompt_tokens_kept=5),
            tokenizer,
            card_of(tokenizer),
            at_once,
        )
    assert (e.value.n_prompt_tokens, e.value.n_ctx) == (8, 20)


async def test_literal_suffix_leaves_the_prompt_alone() -> None:
    tokenizer = letter_tokenizer()
    request = request_of("ab", suffix="c", dialect=Dialect.MISTRALRS)
    [prompt] = (await prepare(request, tokenizer, card_of(tokenizer), at_once)).prompts
    assert list(prompt.token_ids) == tokenizer.encode("ab").ids
