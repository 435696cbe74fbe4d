"""The text or bytes of single tokens, as llama.cpp returns them."""

from tokenizers import AddedToken, Tokenizer, decoders, models

from contract.pieces import PieceReader
from gateway.completions.prompt.tokenization import llamacpp_tokens, vllm_tokens
from tests.gateway.completions.prompt.building import encoder_of, letter_tokenizer, tiny_tokenizer
from tests.support.cases import all_cases


def as_bytes(piece: str | list[int]) -> bytes:
    return piece.encode() if isinstance(piece, str) else bytes(piece)


@all_cases(
    "text", ["Once upon\n a  time", "Grüße 😀 \x00\x7f", "<|user|>a</s>", "日本語", "\u00a0\u00ad"]
)
def test_pieces_together_are_the_text(text: str) -> None:
    tokenizer = tiny_tokenizer()
    pieces = PieceReader(tokenizer)
    ids = tokenizer.encode(text).ids
    assert b"".join(as_bytes(pieces.read(token)) for token in ids) == text.encode()


def test_partial_character_is_returned_as_bytes() -> None:
    tokenizer = tiny_tokenizer()
    pieces = [PieceReader(tokenizer).read(token) for token in tokenizer.encode("😀").ids]
    assert len(pieces) > 1
    assert all(isinstance(piece, list) for piece in pieces)
    assert b"".join(map(as_bytes, pieces)) == "😀".encode()


def sentencepiece() -> Tokenizer:
    """Return a tokenizer that writes spaces and bytes as SentencePiece does."""
    vocabulary = {"<s>": 0, "▁a": 1, "<0xF0>": 2, "<0x9F>": 3, "b▁": 4, "<0x0A>": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def test_sentencepiece_tokens_have_spaces_and_bytes() -> None:
    pieces = PieceReader(sentencepiece())
    assert [pieces.read(token) for token in range(6)] == ["<s>", " a", [0xF0], [0x9F], "b ", "\n"]


def test_id_without_a_token_gives_an_empty_piece() -> None:
    for tokenizer in (tiny_tokenizer(), sentencepiece(), Tokenizer(models.WordLevel({"a": 0}))):
        assert PieceReader(tokenizer).read(5_000) == ""


def test_tokenizer_without_a_decoder_gives_its_tokens() -> None:
    assert PieceReader(Tokenizer(models.WordLevel({"ab": 0}))).read(0) == "ab"


def test_tokens_are_returned_in_the_format_of_vllm() -> None:
    encoder = encoder_of(letter_tokenizer(adds_bos=True))
    a, b = encoder.text_ids("ab", adds_special_tokens=False)
    reported = vllm_tokens(encoder, "ab", adds_special_tokens=True, shows_tokens=True, window=9)
    assert reported == {
        "count": 3,
        "max_model_len": 9,
        "tokens": [0, a, b],
        "token_strs": ["<s>", "a", "b"],
    }
    bare = vllm_tokens(encoder, "", adds_special_tokens=False, shows_tokens=False, window=9)
    assert bare == {"count": 0, "max_model_len": 9, "tokens": [], "token_strs": None}


def test_tokens_are_returned_in_the_format_of_llamacpp() -> None:
    encoder = encoder_of(letter_tokenizer(adds_bos=True))
    a, space = encoder.text_ids("a ", adds_special_tokens=False)
    plain = llamacpp_tokens(encoder, "a ", adds_special_tokens=False, shows_pieces=False)
    assert plain == {"tokens": [a, space]}
    shown = llamacpp_tokens(encoder, "a ", adds_special_tokens=True, shows_pieces=True)
    assert shown == {
        "tokens": [
            {"id": 0, "piece": "<s>"},
            {"id": a, "piece": "a"},
            {"id": space, "piece": " "},
        ]
    }
