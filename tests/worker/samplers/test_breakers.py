"""From texts to head and tail tokens, in vocabularies of both common kinds."""

import sys
from pathlib import Path
from random import Random
from types import FrameType

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import worker.demo_model
from worker.samplers.breakers import DryBreakers

Found = set[tuple[frozenset[str], tuple[str, ...]]]


def byte_level(*tokens: str, merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """A vocabulary as of GPT-2: all single bytes, and these tokens."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *tokens]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(*tokens: str) -> Tokenizer:
    """A vocabulary as of Llama 2: byte tokens for missing characters, a blank before every text."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *tokens]
    scores = [(name, -float(len(names) - number)) for number, name in enumerate(names)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def found(tokenizer: Tokenizer, *texts: str) -> Found:
    """Entries, with tokens by name."""
    entries = DryBreakers(tokenizer).resolve(texts)
    names = {
        (
            frozenset(str(tokenizer.id_to_token(head)) for head in heads),
            tuple(str(tokenizer.id_to_token(token)) for token in tail),
        )
        for heads, tail in entries
    }
    assert len(names) == len(entries)
    return names


def entry(heads: str, *tail: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Heads, written with spaces between them, and their tail."""
    return frozenset(heads.split()), tail


def test_tokens_that_contain_the_text_are_whole_breakers() -> None:
    tokenizer = byte_level("Ċ", "ĊĊ", ".Ċ", "Ċx", "xx")
    assert found(tokenizer, "\n") == {entry(".Ċ Ċ ĊĊ Ċx")}


def test_tokens_that_end_with_the_beginning_need_the_rest() -> None:
    tokenizer = byte_level("ab", "bc", "xa", "abcd", "cb", "abca")
    assert found(tokenizer, "abc") == {
        entry("abca abcd"),
        entry("a xa", "b", "c"),
        entry("ab", "c"),
    }


def test_tail_is_tokenised_by_the_tokenizer() -> None:
    tokenizer = byte_level("ab", "bc", merges=(("b", "c"),))
    assert found(tokenizer, "abc") == {entry("a", "bc"), entry("ab", "c")}


def test_texts_share_entries_with_one_tail() -> None:
    tokenizer = byte_level("xa", "xb")
    assert found(tokenizer, "a", "b", "ac", "bc", "a", "") == {
        entry("a b xa xb"),
        entry("a b xa xb", "c"),
    }


def test_characters_of_several_bytes_may_be_split() -> None:
    tokenizer = byte_level("Ã©", "xÃ")
    assert found(tokenizer, "é") == {entry("Ã©"), entry("Ã xÃ", "©")}


def test_tails_are_cut() -> None:
    (single, *others) = DryBreakers(byte_level()).resolve(["a" + "b" * 39])
    assert others == []
    assert len(single[1]) == 20


def test_longer_texts_than_the_contract_allows_are_cut() -> None:
    breakers = DryBreakers(byte_level("a" * 40))
    assert breakers.resolve(["a" * 10_000])[0] == ([256], [])


def test_special_tokens_can_be_breakers() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|end|>"])
    assert entry("<|end|>") in found(tokenizer, "end|")


def test_blanks_and_bytes_of_sentence_piece() -> None:
    tokenizer = sentence_piece("\u2581the", "the", "e", ":", "\u2581:", "th", "t", "h", "r", "er")
    assert found(tokenizer, "\n") == {entry("<0x0A>")}
    assert found(tokenizer, ":") == {entry(": <0x3A> \u2581:")}
    assert found(tokenizer, " the") == {entry("\u2581the"), entry("<0x20> \u2581", "the")}
    # The rest of a text has no blank before it, unlike a separate text.
    assert found(tokenizer, "ther") == {
        entry("<0x74> t", "h", "er"),
        entry("th", "er"),
        entry("the \u2581the", "r"),
    }


def test_tokens_and_texts_of_the_demo_model() -> None:
    folder = Path(worker.demo_model.__file__).parent / "checkpoint"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    breakers = DryBreakers(tokenizer)
    for text in ("\n", ":", '"', "*", "###", "</s>", "Assistant:", " the "):
        for heads, tail in breakers.resolve([text]):
            rest = tokenizer.decode(tail, skip_special_tokens=False)
            for head in heads:
                whole = tokenizer.decode([head], skip_special_tokens=False) + rest
                assert text in whole or len(tail) == 20


@pytest.fixture(scope="module")
def large() -> DryBreakers:
    random = Random(1)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = {
        random.choice(["", "Ġ", "Ċ"]) + "".join(random.choices(letters, k=random.randint(2, 10)))
        for _ in range(20_000)
    }
    breakers = DryBreakers(byte_level(*sorted(words)))
    breakers.prepare()
    breakers.resolve(["as NumPy imports modules when it first needs them"])
    return breakers


@pytest.mark.parametrize("text", ["\n", "e", " the", "etaoin" * 6, "\nUser: hello there"])
def test_large_vocabularies_are_searched_quickly(large: DryBreakers, text: str) -> None:
    calls = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = large.resolve([text])
    finally:
        sys.setprofile(None)
    assert found
    # Some for each character, and none for each token.
    assert 0 < calls < 10_000
