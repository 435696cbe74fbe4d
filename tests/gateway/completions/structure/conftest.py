"""The demo model's tokenizer in llguidance's form, and checks of grammars."""

from collections.abc import Callable
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from gateway.completions.structure.sandbox import pool
from tests.support.patience import PATIENCE_SECONDS

CHECKPOINT = Path(__file__).parents[4] / "worker" / "demo_model" / "checkpoint"
EOS_ID = 1


@pytest.fixture(autouse=True)
def patient_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give sandboxes enough time to start on a busy machine."""
    for name in ("_START_SECONDS", "_LOAD_SECONDS"):
        monkeypatch.setattr(pool, name, PATIENCE_SECONDS)


@pytest.fixture(scope="session")
def tokenizer_json() -> bytes:
    return (CHECKPOINT / "tokenizer.json").read_bytes()


@pytest.fixture(scope="session")
def tokenizer(tokenizer_json: bytes) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json.decode())


@pytest.fixture(scope="session")
def ll_tokenizer(tokenizer_json: bytes) -> LLTokenizer:
    return LLTokenizer(tokenizer_json.decode(), eos_token=EOS_ID)


@pytest.fixture(scope="session")
def accepts(ll_tokenizer: LLTokenizer, tokenizer: Tokenizer) -> Callable[[str, str], bool]:
    """Return whether a grammar accepts a whole text that is split into the smallest tokens."""

    def whether(grammar: str, text: str) -> bool:
        matcher = LLMatcher(ll_tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = [
            token
            for letter in text
            for token in tokenizer.encode(letter, add_special_tokens=False).ids
        ]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return whether


@pytest.fixture(scope="session")
def accepts_ids(ll_tokenizer: LLTokenizer) -> Callable[[str, list[int]], bool]:
    """Return whether a grammar accepts given tokens as a whole text."""

    def whether(grammar: str, ids: list[int]) -> bool:
        matcher = LLMatcher(ll_tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return whether
