"""Text is text: special tokens in messages and tools are encoded as text, in every tokenizer."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from gateway.completions.prompt.literal_text import (
    MARK,
    pattern_of,
    protected,
    token_ids,
    unmarked,
)
from gateway.completions.prompt.tokenizers import _literal_copy
from gateway.dialects.wire import WrittenObject
from tests.gateway.completions.prompt.building import (
    END,
    TEXT,
    letter_tokenizer,
    sentencepiece,
    tiny_tokenizer,
    word_piece,
)
from tests.support.examples import examples

TOKENIZERS = {
    "byte-level BPE": tiny_tokenizer(),
    "prepended spaces": letter_tokenizer(END, spaces=True),
    "Unigram, first": sentencepiece("first"),
    "Unigram, always": sentencepiece("always"),
    "WordPiece": word_piece(),
}
TEXTS = st.text(TEXT, max_size=12)


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
    # A call keeps the text in which the model wrote its arguments.
    called = WrittenObject({"a": text}, f'{{"a":{json.dumps(text, ensure_ascii=False)}}}')
    written = protected(called, tokenizer)
    assert json.loads(written.text) == written == {"a": shielded["content"][0]}
    assert unmarked(written.text) == called.text
    ids = token_ids(f"{END}{shielded['content'][0]}{END}x", tokenizer, inner)
    end = tokenizer.token_to_id(END)
    places = [place for place, token in enumerate(ids) if token == end]
    assert len(places) == 2
    assert places[0] == 0 < places[1] - 1


def test_places_of_tokens_are_asked_for_once() -> None:
    # A list of all places for each of a chat's messages took seconds.
    tokenizer, asked = tiny_tokenizer(), list[object]()
    [encoding] = tokenizer.encode_batch([f"{END}a{MARK}b" * 9], add_special_tokens=False)

    class Counting:
        ids = encoding.ids

        @property
        def offsets(self) -> list[tuple[int, int]]:
            asked.append(self)
            return encoding.offsets

    class Encoder:
        get_added_tokens_decoder = tokenizer.get_added_tokens_decoder

        def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[Counting]:
            assert not add_special_tokens
            return [Counting() for _ in texts]

    counting: Any = Encoder()
    token_ids(f"{END}a{MARK}b" * 9, counting, _literal_copy(tokenizer, is_inner=True))
    assert len(asked) == 1


def test_allowed_tokens_stay_and_other_values_are_not_copied() -> None:
    tokenizer = tiny_tokenizer()
    assert protected("<think>a</think></s>", tokenizer, allowed=("<think>", "</think>")) == (
        f"<think>a</think><{MARK}/s>"
    )
    plain = {"a": [1, None, "b"]}
    assert protected(plain, tokenizer) is plain


def test_only_what_the_tokenizer_would_find_is_protected() -> None:
    tokenizer = word_piece()
    tokenizer.add_special_tokens([AddedToken("<x>", normalized=False), AddedToken("<x>y>")])
    # The normalizer changes the case of the text in which it looks for a normalized token only.
    given = f"{END.upper()} <X> <x>y> {MARK}<x>"
    assert protected(given, tokenizer) == (
        f"<{MARK}{END[1:].upper()} <X> <{MARK}x>y> {MARK}{MARK}<{MARK}x>"
    )
    assert protected("<s>", Tokenizer(models.BPE({}, []))) == "<s>"


@examples(200, long=5000)
@given(st.sets(st.text("a<|.", min_size=1, max_size=4), min_size=1), st.text("a<|.b", max_size=40))
def test_pattern_finds_the_longest_token(tokens: set[str], text: str) -> None:
    plain = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    assert re.findall(pattern_of(tokens), text) == re.findall(plain, text)
