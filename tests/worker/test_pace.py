"""How often new text is sent."""

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
