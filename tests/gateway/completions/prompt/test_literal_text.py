"""Text is text: special tokens in messages and tools are encoded as text, in every tokenizer."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gateway.completions.prompt.literal_text import MARK, protected, token_ids, unmarked
from gateway.completions.prompt.tokenizers import _literal_copy
from tests.gateway.completions.prompt.building import letter_tokenizer, tiny_tokenizer
from tests.support.examples import examples

END = "<|user|>"
LETTERS = " abcxyz.:☺\n<|>▁"


def sentencepiece(scheme: str) -> Tokenizer:
    """Return a Unigram tokenizer with SentencePiece's spaces."""
    pieces = [("<unk>", 0.0), *((each, -2.0) for each in LETTERS), ("▁a", -1.0), ("bc", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens([END])
    return tokenizer


def word_piece() -> Tokenizer:
    """Return a WordPiece tokenizer that ignores case."""
    letters = [*LETTERS, *(f"##{each}" for each in LETTERS), "abc", "##xyz", "[UNK]", "user"]
    vocabulary = {token: place for place, token in enumerate(dict.fromkeys(letters))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken(END, normalized=True)])
    return tokenizer


TOKENIZERS = {
    "byte-level BPE": tiny_tokenizer(),
    "prepended spaces": letter_tokenizer(END, spaces=True),
    "Unigram, first": sentencepiece("first"),
    "Unigram, always": sentencepiece("always"),
    "WordPiece": word_piece(),
}
TEXTS = st.text(LETTERS, max_size=12)


@pytest.mark.parametrize("name", TOKENIZERS)
@examples(60, long=2000)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.data())
def test_marks_change_no_token_of_other_text(name: str, texts: list[str], data: Any) -> None:
    tokenizer = TOKENIZERS[name]
    inner = _literal_copy(tokenizer, is_inner=True)
    texts = [re.sub(r"<\|", "<", each) for each in texts]
    # A mark before each end of a doubled one is what a client's own code point becomes.
    marked = []
    for text in texts:
        place = data.draw(st.integers(0, len(text)))
        marked.append(text[:place] + MARK + text[place:] if place else text)
    plain = tokenizer.encode(END.join(["", *texts]), add_special_tokens=False).ids
    assert token_ids(END.join(["", *marked]), tokenizer, inner) == plain


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", [END, f"a{END}b{END}", f"{END}{MARK}a", END.upper()])
def test_special_tokens_of_a_text_are_no_tokens(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    inner = _literal_copy(tokenizer, is_inner=True)
    shielded = protected({"content": [text, {"b": text}]}, tokenizer)
    assert json.loads(unmarked(json.dumps(shielded, ensure_ascii=False))) == {
        "content": [text, {"b": text}]
    }
    ids = token_ids(f"{END}{shielded['content'][0]}{END}x", tokenizer, inner)
    end = tokenizer.token_to_id(END)
    places = [place for place, token in enumerate(ids) if token == end]
    assert len(places) == 2
    assert places[0] == 0 < places[1] - 1


def test_allowed_tokens_stay_and_other_values_are_not_copied() -> None:
    tokenizer = tiny_tokenizer()
    assert protected("<think>a</think></s>", tokenizer, allowed=("<think>", "</think>")) == (
        f"<think>a</think><{MARK}/s>"
    )
    plain = {"a": [1, None, "b"]}
    assert protected(plain, tokenizer) is plain
