"""Replies that a dead owner may have sent to its client count, and no others."""

from typing import Any

from contract.messages import (
    Delta,
    Frame,
    GenerationJob,
    JobFailed,
    JobFinished,
    JobStarted,
    PromptScored,
)
from contract.outcomes import FailureCode
from contract.prompts import packed
from contract.sampling import SamplingSpec
from gateway.completions.stored.history import History, frame_messages
from gateway.completions.stored.journal import (
    Received,
    decode_entry,
    encode_entries,
    encode_message,
)


def job(**fields: Any) -> GenerationJob:
    known: dict[str, Any] = {
        "id": "cmpl-1-0",
        "handle": 7,
        "gateway": "gw",
        "tenant": "acme",
        "cache_salt": "salt",
        "prompt_token_ids": packed([1, 2, 3]),
        "max_tokens": 8,
        "sampling": SamplingSpec(seed=1, temperature=1.0),
        "deadline_ms": 1,
    }
    return GenerationJob(**(known | fields))


def said(
    attempt: int, start: int, *tokens: int, choice: int = 0, prompt_index: int = 0
) -> Received:
    text = "".join(chr(96 + token) for token in tokens)
    return Received(prompt_index, Delta(7, attempt, choice, start, text, list(tokens)))


def ended(attempt: int, tokens: int) -> Received:
    return Received(0, JobFinished(7, attempt, 3, tokens, 0))


def text(history: History, choice: int = 0) -> str:
    deltas = [message for _, message in history.received if isinstance(message, Delta)]
    return "".join(delta.text for delta in deltas if delta.choice == choice)


def test_entry_decodes_to_its_input() -> None:
    received = [
        Received(0, JobStarted(7, 1, 3, 2, "class")),
        Received(1, PromptScored(8, 1, [])),
        said(1, 0, 1, 2),
        ended(1, 2),
        Received(1, JobFailed(8, 1, FailureCode.SHED, "so")),
    ]
    [entry] = encode_entries([encode_message(*each) for each in received], "5-1")
    assert decode_entry(entry) == (received, "5-1")


def test_frame_gives_replies_in_order() -> None:
    frame = Frame(
        "w",
        1,
        started=[JobStarted(7, 1, 3, 0, "class"), JobStarted(9, 1, 3, 0, "class")],
        deltas=[said(1, 0, 1).message, Delta(9, 1, 0, 0, "x", [1])],  # type: ignore[list-item]
        finished=[JobFinished(7, 1, 3, 1, 0)],
    )
    assert list(frame_messages(frame)) == [*frame.started, *frame.deltas, *frame.finished]


def test_only_replies_that_continue_the_journal_are_accepted() -> None:
    history = History([job()])
    history.add([said(2, 0, 1, 2)])

    unread = history.add_unread([said(1, 2, 9), said(2, 2, 3), said(2, 2, 3), said(2, 5, 6)])

    assert unread == [said(2, 2, 3)]
    assert text(history) == "abc"


def test_next_attempt_replaces_tokens_after_its_start() -> None:
    history = History([job()])
    history.add([said(1, 0, 1)])

    unread = history.add_unread(
        [said(1, 1, 2), said(1, 2, 9), said(1, 3, 9), ended(1, 4), said(2, 2, 3), ended(2, 3)]
    )

    assert unread == [said(1, 1, 2), said(2, 2, 3), ended(2, 3)]
    assert text(history) == "abc"
    assert history.has_ended


def test_start_counts_once_for_each_class() -> None:
    history, starts = History([job()]), [Received(0, JobStarted(7, 1, 3, 2, "a"))]
    starts.append(Received(0, JobStarted(7, 2, 3, 2, "b")))
    again = Received(0, JobStarted(7, 3, 3, 2, "b"))
    assert history.add_unread([*starts, again]) == starts


def test_each_choice_is_truncated_separately() -> None:
    history = History([job(n=2)])

    history.add_unread(
        [
            said(1, 0, 1),
            said(1, 0, 2, choice=1),
            said(1, 1, 9),
            said(1, 1, 9, choice=1),
            said(2, 1, 3),
            said(2, 2, 4),
            said(2, 1, 5, choice=1),
        ]
    )

    assert (text(history), text(history, 1)) == ("acd", "be")
    assert [dict(each.tokens) for each in history.jobs] == [{0: 3, 1: 2}]


def test_journal_is_never_truncated() -> None:
    history = History([job()])
    history.add([said(1, 0, 1), said(1, 1, 2)])

    assert not history.add_unread([said(2, 1, 9)])
    assert text(history) == "ab"


def test_end_with_contradicting_counts_is_ignored() -> None:
    history = History([job()])
    assert history.add_unread([said(1, 0, 1), ended(1, 2)]) == [said(1, 0, 1)]
    assert not history.has_ended


def test_failure_ends_a_job() -> None:
    history = History([job(), job()])
    failed = JobFailed(7, 1, FailureCode.ENGINE_ERROR, "")
    history.add_unread([Received(1, failed), said(1, 0, 1, prompt_index=1), said(1, 0, 1)])
    assert history.failure == failed
    assert history.of(1) == [failed]
    assert history.of(0) == [said(1, 0, 1).message]
