"""Small tokenizers, cards and requests for the tests of prompts."""

from collections.abc import Callable
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from contract.messages import WorkerCard, WorkerState
from contract.sampling import SamplingSpec
from gateway.completions.prompt.tokenizers import PromptEncoder
from gateway.dialects.profile import PROFILES, ContextLengthBehavior, Dialect
from gateway.dialects.request import GenerationRequest
from tests.support.stack import CHECKPOINT

T = TypeVar("T")

BOS = 0
END = "<|user|>"
TEXT = " abcxyz.:☺\n<|>▁"
"""Letters of the tokenizers with END."""
LETTERS = "▁abcdefghijklmnopqrstuvwxyz☺.:\n"


def letter_tokenizer(*special: str, adds_bos: bool = False, spaces: bool = False) -> Tokenizer:
    """Return a tokenizer of letters; `spaces` writes spaces as SentencePiece does."""
    vocabulary = {token: place for place, token in enumerate(["<s>", *special, *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ["<s>", *special]])
    replacing = normalizers.Replace(" ", "▁")
    if spaces:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replacing])
    else:
        tokenizer.normalizer = replacing
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    return tokenizer


def sentencepiece(scheme: str) -> Tokenizer:
    """Return a Unigram tokenizer with SentencePiece's spaces."""
    pieces = [("<unk>", 0.0), *((each, -2.0) for each in TEXT), ("▁a", -1.0), ("bc", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens([END])
    return tokenizer


def word_piece() -> Tokenizer:
    """Return a WordPiece tokenizer that ignores case."""
    letters = [*TEXT, *(f"##{each}" for each in TEXT), "abc", "##xyz", "[UNK]", "user"]
    vocabulary = {token: place for place, token in enumerate(dict.fromkeys(letters))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken(END, normalized=True)])
    return tokenizer


def tiny_tokenizer() -> Tokenizer:
    """Return the demo model's tokenizer."""
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def encoder_of(tokenizer: Tokenizer, *, bos_token_id: int | None = BOS) -> PromptEncoder:
    """Return an encoder of all of a tokenizer's tokens."""
    return PromptEncoder(
        tokenizer, vocabulary_size=tokenizer.get_vocab_size(), bos_token_id=bos_token_id
    )


def card_of(tokenizer: Tokenizer, **fields: Any) -> WorkerCard:
    """Return the card of a model with that tokenizer and a window of 20 tokens."""
    known: dict[str, Any] = {
        "engine": "fake",
        "created": 1,
        "context_window": 20,
        "vocabulary_size": tokenizer.get_vocab_size(),
        "bos_token_id": BOS,
    }
    return WorkerCard("w1", "m1", WorkerState.READY, **(known | fields))


async def at_once(work: Callable[[], T], *, size: int = 0) -> T:
    """Do the work of a request inline."""
    return work()


def request_of(
    *prompts: Any, dialect: Dialect = Dialect.OPENAI, **fields: Any
) -> GenerationRequest:
    """Return a request for these prompts."""
    known: dict[str, Any] = {
        "profile": PROFILES[dialect],
        "model": "m1",
        "prompts": list(prompts),
        "images": [[] for _ in prompts],
        "image_params": [[] for _ in prompts],
        "max_tokens": 4,
        "context_length_behavior": ContextLengthBehavior.ERROR,
        "n": 1,
        "best_of": 1,
        "stop": [],
        "includes_stop": False,
        "logprobs": None,
        "echo": False,
        "stream": False,
        "include_usage": False,
        "sampling": SamplingSpec(seed=1),
        "ignored_parameters": (),
    }
    return GenerationRequest(**(known | fields))
