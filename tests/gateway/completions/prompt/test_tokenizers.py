"""Prompts become the token ids of the model's tokenizer."""

import asyncio
import zlib

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from gateway.completions.prompt.tokenizers import PromptEncoder, TokenizerStore
from gateway.completions.structure.tools import has_tool_calls
from gateway.dialects.request import Prompt
from gateway.records.errors import InvalidParameterError, ServiceUnavailableError
from tests.gateway.completions.prompt.building import tiny_tokenizer
from tests.support.cases import all_cases

BOS = 0
VOCABULARY = {"<s>": BOS, "</s>": 1, "a": 2, "b": 3, "c": 4}


def word_tokenizer(*, adds_bos: bool) -> Tokenizer:
    """Return a tokenizer with one token for each word."""
    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token="</s>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    return tokenizer


def encoder(*, adds_bos: bool = True, bos_token_id: int | None = BOS) -> PromptEncoder:
    """Return an encoder of five tokens."""
    return PromptEncoder(
        word_tokenizer(adds_bos=adds_bos), vocabulary_size=5, bos_token_id=bos_token_id
    )


@all_cases(
    ("prompt", "expected"),
    [
        ("a b", [BOS, 2, 3]),
        ("", [BOS]),
        ([2, 3], [2, 3]),
        ([BOS, 2], [BOS, 2]),
        (["a", 3, "c"], [BOS, 2, 3, 4]),
        ([2, "b", "c"], [2, 3, 4]),
        ([4, ""], [4]),
        (["", 4], [BOS, 4]),
    ],
    ids=[
        "text",
        "empty-text",
        "ids",
        "ids-with-bos",
        "mixed-text-first",
        "mixed-id-first",
        "mixed-empty-text",
        "mixed-empty-text-first",
    ],
)
def test_prompt_gets_one_begin_of_text_if_it_begins_with_text(
    prompt: Prompt, expected: list[int]
) -> None:
    assert encoder().encode(prompt, param="prompt") == expected


def test_no_special_tokens_are_added_on_request() -> None:
    plain = encoder()
    assert plain.encode("a b", param="prompt", adds_special_tokens=False) == [2, 3]
    assert plain.encode(["a", 3], param="prompt", adds_special_tokens=False) == [2, 3]
    with pytest.raises(InvalidParameterError, match="'add_special_tokens' is false"):
        plain.encode("", param="prompt", adds_special_tokens=False)


def test_empty_text_becomes_begin_of_text_although_the_tokenizer_adds_none() -> None:
    assert encoder(adds_bos=False).encode("", param="prompt") == [BOS]


def test_empty_text_is_refused_by_a_model_without_begin_of_text() -> None:
    with pytest.raises(InvalidParameterError, match=r"'prompt\[3\]' must not be empty") as caught:
        encoder(adds_bos=False, bos_token_id=None).encode("", param="prompt[3]")
    assert caught.value.param == "prompt"


def test_mixed_prompt_of_nothing_but_empty_text_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="'prompt' must not be empty"):
        encoder(adds_bos=False).encode(["", ""], param="prompt")


@all_cases("token_id", [-1, 5, 2**64, 10**400])
def test_id_outside_the_vocabulary_is_refused_naming_place_bounds_and_value(
    token_id: int,
) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        encoder().encode([2, 3, token_id], param="prompt[1]")
    assert caught.value.message == (
        f"'prompt[1][2]' must be a token id from 0 to 4. Given: {token_id}."
    )


def test_id_outside_the_vocabulary_in_a_mixed_prompt_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"from 0 to 4\. Given: 5"):
        encoder().encode(["a", 5], param="prompt")


@all_cases(
    ("adds_bos", "bos_token_id", "expected"),
    [(True, BOS, [BOS]), (True, None, []), (False, BOS, [])],
)
def test_begin_of_text_is_where_the_tokenizer_puts_it(
    adds_bos: bool, bos_token_id: int | None, expected: list[int]
) -> None:
    assert encoder(adds_bos=adds_bos, bos_token_id=bos_token_id).begin_ids() == expected


def test_tool_calls_are_known_by_their_token() -> None:
    tokenizer = word_tokenizer(adds_bos=False)
    assert not has_tool_calls(tokenizer)
    tokenizer.add_tokens(["<tool_call>"])
    assert has_tool_calls(tokenizer)


def test_decode_shows_special_tokens() -> None:
    assert encoder().decode([BOS, 2, 3]) == "<s> a b"


class Published:
    """The source of tokenizers."""

    def __init__(self, file: bytes | None) -> None:
        self.file = file
        self.fetched: list[str] = []

    async def fetch(self, digest: str) -> bytes | None:
        self.fetched.append(digest)
        await asyncio.sleep(0)
        return self.file


def published(tokenizer: Tokenizer) -> Published:
    """Publish a tokenizer as a worker does."""
    return Published(zlib.compress(tokenizer.to_str().encode()))


async def test_store_fetches_a_tokenizer_once() -> None:
    source = published(word_tokenizer(adds_bos=True))
    store = TokenizerStore(source.fetch)
    tokenizers = await asyncio.gather(*(store.get("d1") for _ in range(5)))
    assert len({id(tokenizer) for tokenizer in tokenizers}) == 1
    assert source.fetched == ["d1"]


async def test_store_drops_truncation_and_padding_of_the_file() -> None:
    tokenizer = word_tokenizer(adds_bos=False)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8, pad_id=1, pad_token="</s>")
    loaded = await TokenizerStore(published(tokenizer).fetch).get("d1")
    assert loaded.encode("a b c").ids == [2, 3, 4]


async def test_store_fetches_again_after_a_tokenizer_was_missing() -> None:
    source = Published(None)
    store = TokenizerStore(source.fetch)
    with pytest.raises(ServiceUnavailableError, match="not published yet") as caught:
        await store.get("d1")
    assert caught.value.retry_after_seconds == 1.0

    source.file = published(word_tokenizer(adds_bos=True)).file
    assert (await store.get("d1")).get_vocab_size() == 5


async def test_literal_copy_reads_special_tokens_as_text() -> None:
    tokenizer = tiny_tokenizer()
    source = published(tokenizer)
    store = TokenizerStore(source.fetch)
    # The last one is added, but not special.
    text = "<|user|>hello</s><think>"
    literals = await asyncio.gather(*(store.get_literal("d1") for _ in range(5)))
    assert len({id(literal) for literal in literals}) == 1
    ids = literals[0].encode(text).ids
    special = set(map(tokenizer.token_to_id, ("<|user|>", "</s>", "<think>")))
    assert special.isdisjoint(ids)
    assert literals[0].decode(ids) == text
    shared = await store.get("d1")
    assert special <= set(shared.encode(text).ids)
    assert source.fetched == ["d1"]
