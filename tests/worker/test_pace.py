"""How often new text is sent, and how fast prompts are processed."""

import pytest

from worker.execution.running_job import PrefillPace
from worker.execution.steps import Pace


def due(pace: Pace, *, sequences: int, step_seconds: float, steps: int) -> list[bool]:
    return [pace.is_due(100.0 + i * step_seconds, sequences) for i in range(steps)]


def test_text_of_few_sequences_is_sent_each_step() -> None:
    assert all(due(Pace(0.015), sequences=4, step_seconds=0.003, steps=10))


def test_text_of_slow_steps_is_sent_each_step() -> None:
    assert all(due(Pace(0.015), sequences=512, step_seconds=0.02, steps=10))


def test_text_of_fast_steps_of_a_full_batch_is_gathered() -> None:
    assert due(Pace(0.015), sequences=64, step_seconds=0.007, steps=7) == [
        *(True, False, False),
        *(True, False, False),
        True,
    ]


def test_zero_interval_sends_every_step() -> None:
    assert all(due(Pace(0.0), sequences=512, step_seconds=0.0, steps=5))


def test_short_prompts_do_not_hide_what_long_ones_show() -> None:
    pace = PrefillPace()
    assert pace.microseconds == 50.0, "a guess, so that a new worker leaves jobs to others"
    pace.note(100_000, 10.0)
    for _ in range(20):
        pace.note(100, 0.1)
        pace.note(63, 5.0)
    assert 100.0 < pace.microseconds < 125.0
    for _ in range(3):
        pace.note(30_000, 9.0)
    assert pace.microseconds == pytest.approx(300, rel=0.1)
