"""Fast tokenizers: encode long texts with fastokens, where its ids are those of the model's own.

fastokens takes a fraction of the CPU of Hugging Face's tokenizers, and supports fewer of them. A
tokenizer is used if both return the same ids for a corpus. Afterwards, one text each minute is
compared; a difference ends the use of fastokens for the model.
"""

import logging
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol, Self

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from fastokens import Tokenizer as Fastokens

COMPARE_SECONDS: Final = 60.0
_IDS_AT_ONCE: Final = 1_000
_KINDS: Final = (
    "It's 12345.678, isn't it?  \tNo!\r\n\n\n   def f(x):\n        return x**2 // 3  # 10 %\n"
    "ÀÉÎõü ﬁ Ⅷ ½ é\u0301 ß İ \u0131 \u200b\u200d\u00ad\ufeff\x00\x1f\x7f \u2028 "
    "漢字とかな カタカナ 한국어 ไทย עברית العربية हिन्दी Ελληνικά Кириллица "
    "👩‍👩‍👧 🏳️‍🌈 🇩🇪 \U0001f1e6 ☺️ ▁▁ ĠĊ <|x|> [INST] </s> "
)
_RANGES: Final = ((0x20, 0x7F), (0x80, 0x2FFF), (0x3000, 0xD7FF), (0xE000, 0x1FFFF))
_RANDOM_CHARACTERS: Final = 20_000

logger = logging.getLogger(__name__)


class Encoded(Protocol):
    """The ids of one text."""

    @property
    def ids(self) -> list[int]:
        """Its token ids."""
        ...


class FastTokenizer:
    """Encodes texts without the tokenizer's own special tokens around them.

    Safe to call from several threads.
    """

    def __init__(self, exact: Tokenizer, fast: "Fastokens") -> None:
        """Use `fast` as long as its ids are those of `exact`."""
        self._exact = exact
        self._fast = fast
        self._compares_at = 0.0
        self.is_exact = True
        """Whether no difference was found."""

    @classmethod
    def of(cls, exact: Tokenizer, name: str) -> Self | None:
        """Return the fast form of a tokenizer; None if fastokens cannot encode as it does.

        This takes seconds. `name` is for the log.
        """
        import fastokens

        try:
            made = cls(exact, fastokens.Tokenizer.from_json_str(exact.to_str()))
        except Exception as error:
            logger.info("fastokens cannot read the tokenizer %s: %s", name, error)
            return None
        for text in corpus_of(exact):
            made._compares_at = 0.0
            made.encode_batch([text])
        if not made.is_exact:
            return None
        logger.info("fastokens encodes long texts with the tokenizer %s", name)
        return made

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Encoded]:
        """Return the ids of each text."""
        if not self.is_exact:
            return self._encode_exactly(texts)
        try:
            found: Sequence[Encoded] = self._fast.encode_batch([*texts])
        except Exception as error:
            # Such as a limit of its regular expressions.
            logger.warning("fastokens cannot encode a text: %s", error)
            return self._encode_exactly(texts)
        if time.monotonic() < self._compares_at:
            return found
        self._compares_at = time.monotonic() + COMPARE_SECONDS
        expected = self._encode_exactly(texts)
        if [each.ids for each in found] != [each.ids for each in expected]:
            self.is_exact = False
            logger.error("fastokens returned other ids than the model's tokenizer: it is not used")
        return expected

    def _encode_exactly(self, texts: Sequence[str]) -> Sequence[Encoded]:
        return self._exact.encode_batch_fast([*texts], add_special_tokens=False)


def corpus_of(tokenizer: Tokenizer) -> list[str]:
    """Return texts of all kinds, and texts with every token of the vocabulary in random order."""
    chosen = random.Random(0)  # noqa: S311 - always the same texts
    ids = [*range(tokenizer.get_vocab_size())]
    chosen.shuffle(ids)
    starts = range(0, len(ids), _IDS_AT_ONCE)
    tokens = [ids[start : start + _IDS_AT_ONCE] for start in starts]
    numbers = (chosen.randrange(*chosen.choice(_RANGES)) for _ in range(_RANDOM_CHARACTERS))
    any_ = "".join(map(chr, numbers))
    runs = "".join(each * size for each in " \n\ta1漢!" for size in (1, 2, 3, 7, 1_000))
    texts = tokenizer.decode_batch(tokens, skip_special_tokens=False)
    return [_KINDS, _KINDS * 50, any_, runs, *texts]
