"""The parser for the grammar example distinguishes sentences from other texts."""

from tests.e2e.seeds.arithmetic import begins_sentence, is_sentence
from tests.support.cases import all_cases


@all_cases("text", ["1", "12+3", "(1+2)*3", "((4))", "1-2*3/(4-5)"])
def test_sentences_are_accepted(text: str) -> None:
    assert is_sentence(text)
    assert all(begins_sentence(text[:end]) for end in range(len(text)))


@all_cases("text", ["", "1+", "(", "(1", "((1)", "(1+2)*"])
def test_prefixes_are_no_sentences(text: str) -> None:
    assert begins_sentence(text)
    assert not is_sentence(text)


@all_cases("text", ["+1", "1++2", "1)", "()", "1 + 2", "(1)2", "2(1)", "a", "1.5"])
def test_other_texts_are_no_prefixes(text: str) -> None:
    assert not begins_sentence(text)
    assert not is_sentence(text)
