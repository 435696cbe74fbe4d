"""Prompts become the token ids that the model's own tokenizer gives."""

import asyncio
import threading
import time
import zlib
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from gateway.dialects.request import Prompt
from gateway.errors import InvalidParameterError, ServiceUnavailableError
from gateway.prompt.tokenizers import THREAD_CHARACTERS, PromptEncoder, TokenizerStore

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


@pytest.mark.parametrize(
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
async def test_prompt_gets_one_begin_of_text_if_it_begins_with_text(
    prompt: Prompt, expected: list[int]
) -> None:
    encoded = await encoder().encode(prompt, param="prompt")
    assert encoded.token_ids == expected


async def test_text_is_kept_for_the_echo_and_ids_have_none() -> None:
    assert (await encoder().encode(" a  b ", param="prompt")).text == " a  b "
    assert (await encoder().encode([2], param="prompt")).text is None


async def test_empty_text_becomes_begin_of_text_though_the_tokenizer_adds_none() -> None:
    assert (await encoder(adds_bos=False).encode("", param="prompt")).token_ids == [BOS]


async def test_empty_text_is_refused_by_a_model_without_begin_of_text() -> None:
    with pytest.raises(InvalidParameterError, match=r"'prompt\[3\]' must not be empty") as caught:
        await encoder(adds_bos=False, bos_token_id=None).encode("", param="prompt[3]")
    assert caught.value.param == "prompt"


async def test_mixed_prompt_of_nothing_but_empty_text_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="'prompt' must not be empty"):
        await encoder(adds_bos=False).encode(["", ""], param="prompt")


@pytest.mark.parametrize("token_id", [-1, 5, 2**64, 10**400])
async def test_id_outside_the_vocabulary_is_refused_naming_place_bounds_and_value(
    token_id: int,
) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        await encoder().encode([2, 3, token_id], param="prompt[1]")
    assert caught.value.message == (
        f"'prompt[1][2]' must be a token id from 0 to 4. Given: {token_id}."
    )


async def test_id_outside_the_vocabulary_in_a_mixed_prompt_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"from 0 to 4\. Given: 5"):
        await encoder().encode(["a", 5], param="prompt")


async def test_long_text_is_encoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    class Watched:
        """Notes where it is called."""

        def encode(self, text: str, *, add_special_tokens: bool) -> Any:
            threads.append(threading.current_thread())
            return real.encode(text, add_special_tokens=add_special_tokens)

    watched = encoder()
    real = watched._tokenizer
    monkeypatch.setattr(watched, "_tokenizer", Watched())

    long = await watched.encode("a " * THREAD_CHARACTERS, param="prompt")
    short = await watched.encode("a", param="prompt")

    assert long.token_ids == [BOS] + [2] * THREAD_CHARACTERS
    assert short.token_ids == [BOS, 2]
    assert threads[0] is not threading.main_thread()
    assert threads[1] is threading.main_thread()


async def test_event_loop_runs_while_a_long_text_is_encoded() -> None:
    text = "a b c " * 200_000
    longest, stop = 0.0, False

    async def watch() -> None:
        nonlocal longest
        while not stop:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - before)

    watching = asyncio.create_task(watch())
    began = time.perf_counter()
    encoded = await encoder().encode(text, param="prompt")
    took, stop = time.perf_counter() - began, True
    await watching

    assert len(encoded.token_ids) == 600_001
    assert longest < took / 2


def test_decode_shows_special_tokens() -> None:
    assert encoder().decode([BOS, 2, 3]) == "<s> a b"


class Published:
    """Where tokenizers are fetched from."""

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


async def test_store_asks_again_after_a_tokenizer_was_not_published() -> None:
    source = Published(None)
    store = TokenizerStore(source.fetch)
    with pytest.raises(ServiceUnavailableError, match="not published yet") as caught:
        await store.get("d1")
    assert caught.value.retry_after_seconds == 1.0

    source.file = published(word_tokenizer(adds_bos=True)).file
    assert (await store.get("d1")).get_vocab_size() == 5
