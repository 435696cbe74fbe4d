"""A prompt that is encoded in segments has the ids of the whole, and each segment is new once."""

from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gateway.completions.prompt import segments
from gateway.completions.prompt.literal_text import protected, token_ids
from gateway.completions.prompt.preparation import prepare
from gateway.completions.prompt.segments import (
    ENTRY_BYTES,
    LEAST_CHARACTERS,
    KnownSegments,
    SegmentCache,
    Segmenter,
)
from gateway.completions.prompt.tokenizers import _literal_copy
from gateway.dialects.request import ChatRequest
from tests.gateway.completions.prompt.building import (
    END,
    TEXT,
    at_once,
    card_of,
    letter_tokenizer,
    request_of,
    sentencepiece,
    tiny_tokenizer,
    word_piece,
)
from tests.support.examples import examples

ADDED = {
    "<s>": {},
    "<s>a": {},
    "|<s>": {},
    "<e>": {"rstrip": True},
    "<l>": {"lstrip": True},
    "abc": {"single_word": True},
    "<w>": {"single_word": True},
    "\n\n": {},
    "▁▁": {},
    "yz": {"normalized": True},
    "[A]": {"rstrip": True, "lstrip": True, "normalized": True},
}
"""Added tokens of all kinds; some contain others or overlap with them."""


def metaspace_bpe(scheme: str) -> Tokenizer:
    """Return a BPE tokenizer with SentencePiece's spaces, as Llama's and Mistral's."""
    pieces = ["<unk>", *dict.fromkeys(TEXT), "▁a", "bc", "▁abc", "▁▁"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("b", "c"), ("▁a", "bc"), ("▁", "▁")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    if scheme == "normalizer":
        prepending = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(prepending)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([END])
    return tokenizer


def byte_level(*, is_composed: bool) -> Tokenizer:
    """Return the demo model's tokenizer, or one with Qwen's normalizer and a prefixed space."""
    tokenizer = tiny_tokenizer()
    if is_composed:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    """Add tokens of all kinds."""
    known = {"normalized": False}
    tokenizer.add_tokens([AddedToken(each, **(known | kind)) for each, kind in ADDED.items()])
    return tokenizer


TOKENIZERS = {
    "byte-level BPE": with_added(byte_level(is_composed=False)),
    "byte-level BPE, composed": with_added(byte_level(is_composed=True)),
    "Metaspace BPE, first": with_added(metaspace_bpe("first")),
    "Metaspace BPE, always": with_added(metaspace_bpe("always")),
    "Metaspace BPE, prepended": with_added(metaspace_bpe("normalizer")),
    "Unigram, first": with_added(sentencepiece("first")),
    "Unigram, always": with_added(sentencepiece("always")),
    "WordPiece": with_added(word_piece()),
    "prepended spaces": with_added(letter_tokenizer(END, spaces=True)),
}
TEXTS = st.lists(
    st.sampled_from([END, *ADDED]) | st.text(TEXT + "e\u0301é", max_size=6), max_size=24
).map("".join)


@pytest.fixture(autouse=True)
def _short() -> Iterator[None]:
    """Divide texts of the length that tests can search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SHORTEST_SEGMENT", 3)
        patch.setattr(segments, "LONGEST_JOINED", 9)
        yield


def known(tokenizer: Tokenizer, tenant_id: str = "t1", **bounds: int) -> KnownSegments:
    """Return an encoder with an empty cache."""
    most = {"most_bytes": 100_000, "most_bytes_of_tenant": 50_000} | bounds
    segmenter = Segmenter.of(tokenizer)
    assert segmenter is not None
    return KnownSegments(SegmentCache(**most), segmenter, "d1", tenant_id)


@pytest.mark.parametrize("name", TOKENIZERS)
@examples(30, long=1000)
@given(first=TEXTS, second=TEXTS, is_protected=st.booleans())
def test_segments_have_the_ids_of_the_whole(
    name: str, first: str, second: str, *, is_protected: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    encoder, inner = known(tokenizer), _literal_copy(tokenizer, is_inner=True)
    kept = first if not is_protected else protected(first, tokenizer)
    # The second text begins with what is known, and the third ends with it.
    for text in (kept, kept + second, END + second + kept, second):
        whole = token_ids(text, tokenizer, inner)
        assert encoder.encode(text, tokenizer, inner).tolist() == whole
    if not is_protected:
        whole = tokenizer.encode(first, add_special_tokens=False).ids
        assert encoder.encode(first, tokenizer, None).tolist() == whole


def test_a_change_moves_only_the_segments_beside_it() -> None:
    segmenter = Segmenter.of(TOKENIZERS["byte-level BPE"])
    assert segmenter is not None
    turns = [f"{END}turn {number}{'.' * (number % 7)}<s>\n" for number in range(40)]
    before = segmenter.split("".join(turns))
    assert len(before) >= 40
    turns[20] = f"{END}another"
    after = segmenter.split("".join(turns))
    assert len({*after} - {*before}) <= 2


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [AddedToken("<a>", lstrip=True, normalized=False)],
        [AddedToken("<a>", single_word=True, normalized=False)],
        [AddedToken("a>", normalized=False), AddedToken("\n", normalized=False)],
        [AddedToken("<a>", normalized=True)],
    ],
)
def test_texts_without_safe_places_are_encoded_as_a_whole(tokens: list[AddedToken]) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.add_tokens(tokens)
    assert Segmenter.of(tokenizer) is None


def test_random_tokenizers_encode_each_text_as_a_whole() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "aa": 1}, [("a", "a")], dropout=0.5))
    tokenizer.add_tokens([AddedToken("<a>", normalized=False)])
    assert Segmenter.of(tokenizer) is None


class Counting:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


async def test_the_next_turn_of_a_session_encodes_only_what_is_new() -> None:
    tokenizer = TOKENIZERS["byte-level BPE"]
    counting: Any = Counting(tokenizer)
    encoder = known(tokenizer)
    card = card_of(tokenizer, context_window=100_000)
    turn = f"{END}a file: {'a.b ' * 100}\n"
    fresh = f"{END}and now?\n"

    async def prepared(text: str, encoder: KnownSegments, **fields: Any) -> list[int]:
        counting.characters = 0
        request = request_of(text, adds_special_tokens=False, **fields)
        done = await prepare(request, counting, card, at_once, known=encoder)
        return done.prompts[0].token_ids.tolist()

    history = "".join(turn.replace("file", f"file {number}") for number in range(20))
    assert len(history) > LEAST_CHARACTERS
    whole = tokenizer.encode(history + fresh, add_special_tokens=False).ids
    await prepared(history, encoder, chat=ChatRequest(messages=[]))
    assert counting.characters == len(history)
    assert await prepared(history + fresh, encoder, chat=ChatRequest(messages=[])) == whole
    assert counting.characters == len(fresh)
    # Nobody learns from the time whether somebody else has sent a text.
    for other in (encoder._replace(tenant_id="t2"), encoder._replace(isolation_key="u2")):
        assert await prepared(history + fresh, other) == whole
        assert counting.characters == len(history + fresh)
    # A completion may contain the mark of a protected text.
    marked = f"{history}\ufdd0a"
    assert await prepared(marked, encoder) == (
        tokenizer.encode(marked, add_special_tokens=False).ids
    )


def test_a_tenant_that_floods_the_cache_changes_nobody_elses_hits() -> None:
    size = 4 * 16 + ENTRY_BYTES
    cache = SegmentCache(most_bytes=100 * size, most_bytes_of_tenant=60 * size)
    ids = array("I", range(16)).tobytes()

    def names(tenant: str, *numbers: int) -> list[bytes]:
        return [f"{tenant}{number}".encode() for number in numbers]

    def put(tenant: str, *numbers: int) -> None:
        cache.put(tenant, dict.fromkeys(names(tenant, *numbers), ids))

    others = [f"t{number}" for number in range(5)]
    for tenant in others:
        put(tenant, *range(10))
    for number in range(1000):
        put("flood", number)
        assert cache.bytes <= 100 * size
    for tenant in others:
        assert [*cache.get(tenant, names(tenant, *range(10)))] == names(tenant, *range(10))
    assert cache.get("flood", names("t0", 1)) == {}
    assert 40 < len(cache.get("flood", names("flood", *range(1000)))) <= 50
    # Alone, a tenant has its bound, and loses what it has used least recently.
    cache = SegmentCache(most_bytes=100 * size, most_bytes_of_tenant=60 * size)
    put("flood", *range(60))
    assert cache.bytes == 60 * size
    cache.get("flood", names("flood", 0))
    put("flood", 60)
    put("flood", 60)
    assert cache.bytes == 60 * size
    assert [*cache.get("flood", names("flood", 0, 1, 60))] == names("flood", 0, 60)
    # More than all the room leaves nothing, and no tenant without segments.
    cache.put("other", {b"large": bytes(200 * size)})
    assert cache.get("other", [b"large"]) == {}
    assert cache.bytes == 60 * size
