"""fastokens encodes long texts only as the model's own tokenizer does."""

import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from tokenizers import Tokenizer

from gateway.completions.prompt.fast_tokenizers import COMPARE_SECONDS, FastTokenizer
from gateway.completions.prompt.segments import LEAST_CHARACTERS, SegmentCache
from gateway.completions.prompt.tokenizers import PromptEncoder, TokenizerStore
from tests.gateway.completions.prompt.building import tiny_tokenizer
from tests.gateway.completions.prompt.test_segments import TEXTS, TOKENIZERS
from tests.gateway.conftest import eventually
from tests.support.examples import examples

FAST = {name: FastTokenizer.of(each, name) for name, each in TOKENIZERS.items()}


class Wrong:
    """In the place of fastokens: returns what a test says."""

    def __init__(self, result: Exception | Sequence[int]) -> None:
        self._result = result

    def encode_batch(self, texts: list[str]) -> list[Any]:
        """Return the same ids for each text."""
        if isinstance(self._result, Exception):
            raise self._result
        return [SimpleNamespace(ids=self._result) for _ in texts]


def test_tokenizers_of_most_models_are_fast() -> None:
    # Such as those of Llama 3, Qwen, DeepSeek and gpt-oss.
    assert {name for name, fast in FAST.items() if fast} >= {
        "byte-level BPE",
        "byte-level BPE, composed",
    }


@pytest.mark.parametrize("name", [name for name, fast in FAST.items() if fast])
@examples(30, long=3000)
@given(text=TEXTS)
def test_ids_are_those_of_the_tokenizer(name: str, text: str) -> None:
    fast = FAST[name]
    assert fast is not None
    expected = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    assert fast._fast.encode_batch([text])[0].ids == expected


@pytest.mark.parametrize("result", [[1, 2], ValueError("A limit is reached.")], ids=str)
def test_other_ids_and_errors_never_reach_a_prompt(
    result: Exception | Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer()
    fast = FastTokenizer.of(tokenizer, "tiny")
    assert fast is not None
    monkeypatch.setattr(fast, "_fast", Wrong(result))
    fast._compares_at -= COMPARE_SECONDS + 1
    expected = tokenizer.encode("some text", add_special_tokens=False).ids
    for _ in range(2):
        assert [each.ids for each in fast.encode_batch(["some text"])] == [expected]
    assert fast.is_exact is isinstance(result, Exception)


def test_tokenizer_that_fastokens_encodes_otherwise_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = SimpleNamespace(from_json_str=lambda _: Wrong([1, 2]))
    monkeypatch.setattr("fastokens.Tokenizer", wrong)
    assert FastTokenizer.of(tiny_tokenizer(), "tiny") is None


@pytest.mark.parametrize("is_fast", [False, True])
async def test_long_prompts_are_fast_where_the_operator_wants_that(*, is_fast: bool) -> None:
    tokenizer = TOKENIZERS["byte-level BPE"]

    async def fetch(digest: str) -> bytes:
        return zlib.compress(tokenizer.to_str().encode())

    cache = SegmentCache(most_bytes=100_000, most_bytes_of_tenant=50_000)
    store = TokenizerStore(fetch, cache, is_fast=is_fast)
    own: Tokenizer = await store.get("d1")
    if is_fast:
        await eventually(lambda: "d1" in store._fast, what="the fast tokenizer")
    known = store.known("d1", "t1", "")
    assert known is not None
    assert (known.fast is not None) == is_fast
    encoder = PromptEncoder(own, vocabulary_size=10_000, bos_token_id=None, known=known)
    text = "A long text. " * (LEAST_CHARACTERS // 8)
    for adds in (False, True):
        expected = own.encode(text, add_special_tokens=adds).ids
        assert [*encoder.encode(text, param="prompt", adds_special_tokens=adds)] == expected
