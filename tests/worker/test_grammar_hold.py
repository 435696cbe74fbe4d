"""Masks of one tenant's grammars take a bounded part of each step, and tenants take turns."""

from types import SimpleNamespace
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from tests.worker.conftest import MODEL_FOLDER
from worker.engine.vllm.grammar_hold import (
    FIRST_MASK_SECONDS,
    MASKS_SHARE,
    MOST_MASK_SECONDS,
    GrammarHold,
    timed,
)
from worker.engine.vllm.prompt_turns import payer, tenant_of

TOKENIZER = LLTokenizer((MODEL_FOLDER / "tokenizer.json").read_text())
SLOW = 'start: (w " ")*\nw: ' + " | ".join(f"/[a-z]{{1,{n}}}x{n}/" for n in range(1, 101))


def sequence(tenant: str, seconds: float | None = None, *, priority: int = 0) -> Any:
    grammar = SimpleNamespace(steps=[])
    if seconds is not None:
        grammar.mask_seconds = seconds
    return SimpleNamespace(
        session_id=payer(tenant, 1.0),
        priority=priority,
        is_prefill_chunk=False,
        use_structured_output=True,
        next_decode_eligible_step=0,
        structured_output_request=SimpleNamespace(grammar=grammar),
    )


class Steps:
    """Schedules as vLLM does, and notes in which steps each grammar got a mask."""

    def __init__(
        self,
        running: list[Any],
        waiting: list[Any] | None = None,
        *,
        seconds: float = 1.0,
        is_cpu: bool = True,
    ) -> None:
        """`seconds` is the time of a step."""
        self.hold = GrammarHold(
            is_cpu=is_cpu, clock=lambda: 100 + self.scheduler.current_step * seconds
        )
        self.waiting = waiting or []
        self.scheduler = SimpleNamespace(current_step=0, running=running, waiting=self.waiting)

    def run(self) -> list[Any]:
        """Return the sequences of the next step."""
        scheduler = self.scheduler
        self.hold.begin_step(scheduler)
        number = scheduler.current_step = scheduler.current_step + 1
        begun = [
            each
            for each in self.waiting
            if not each.use_structured_output or self.hold.may_begin(each)
        ]
        chosen = [each for each in scheduler.running if each.next_decode_eligible_step <= number]
        for each in begun:
            self.waiting.remove(each)
        scheduler.running += begun
        for each in (*chosen, *begun):
            grammar = each.structured_output_request.grammar
            grammar.steps.append(number)
            grammar.filled_at = float(number)
            grammar.mask_seconds = getattr(grammar, "mask_seconds", FIRST_MASK_SECONDS)
        return [*chosen, *begun]


def unconstrained(tenant: str) -> Any:
    request = sequence(tenant)
    request.use_structured_output = False
    return request


def steps_of(request: Any) -> list[int]:
    steps: list[int] = request.structured_output_request.grammar.steps
    return steps


def test_masks_of_a_step_take_bounded_time_and_every_sequence_progresses() -> None:
    slow = MOST_MASK_SECONDS / 4
    steps = Steps([sequence("a", slow) for _ in range(40)])
    assert [len(steps.run()) for _ in range(10)] == [4] * 10
    assert sorted(map(len, map(steps_of, steps.scheduler.running))) == [1] * 40


def test_cheap_grammars_are_never_left_out() -> None:
    steps = Steps([sequence("a", MOST_MASK_SECONDS / 100) for _ in range(90)])
    assert [len(steps.run()) for _ in range(3)] == [90] * 3


def test_one_tenants_grammars_leave_another_its_turn() -> None:
    other, free = sequence("b", MOST_MASK_SECONDS / 4), unconstrained("b")
    many = [sequence("a", MOST_MASK_SECONDS / 4) for _ in range(70)]
    steps = Steps([*many, other, free])
    for _ in range(8):
        taken = steps.run()
        assert other in taken
        assert free in taken
    batch = [sequence("a", MOST_MASK_SECONDS, priority=1)]
    steps = Steps([*batch, sequence("a", MOST_MASK_SECONDS)])
    assert [each.priority for _ in range(3) for each in steps.run()] == [0] * 3


def test_sequences_begin_gradually_but_begin_beside_any_others() -> None:
    new = [sequence("a") for _ in range(70)]
    steps = Steps([], new)
    most = MOST_MASK_SECONDS / FIRST_MASK_SECONDS
    assert 1 < len(steps.run()) <= most + 1
    steps = Steps([sequence("a", MOST_MASK_SECONDS) for _ in range(40)], [sequence("b")])
    assert "b" in [tenant_of(each) for each in steps.run()]


def test_masks_take_no_more_of_a_step_than_its_model() -> None:
    slow = MOST_MASK_SECONDS / 10
    steps = Steps([sequence("a", slow) for _ in range(40)], seconds=2.5 * slow / MASKS_SHARE)
    steps.run()
    assert [len(steps.run()) for _ in range(4)] == [3] * 4
    # On GPUs, they are filled while the model runs.
    steps = Steps([sequence("a", slow) for _ in range(40)], seconds=slow, is_cpu=False)
    assert [len(steps.run()) for _ in range(4)] == [10] * 4


def test_first_token_of_another_tenant_waits_for_no_mask_in_its_own_step() -> None:
    slow = [sequence("a", MOST_MASK_SECONDS / 4) for _ in range(8)]
    steps = Steps([*slow], [unconstrained("b")])
    own = [tenant_of(each) for each in steps.run()]
    assert own == ["b"]
    # However many prompts follow, the grammars progress in every second step.
    for _ in range(4):
        steps.waiting.append(unconstrained("b"))
        steps.run()
    assert sorted(map(len, map(steps_of, slow))) == [1] * 8
    # Prompts of a tenant with more sequences displace nothing.
    small = sequence("b", MOST_MASK_SECONDS / 4)
    steps = Steps([small, *(unconstrained("a") for _ in range(9))], [unconstrained("a")])
    assert small in steps.run()


def test_waiting_sequence_of_a_tenant_begins_beside_many_of_another() -> None:
    steps = Steps([sequence("a", MOST_MASK_SECONDS)], [*(sequence("a") for _ in range(70))])
    steps.waiting.append(sequence("b"))
    assert "b" in [tenant_of(each) for each in steps.run()]


def test_time_of_a_mask_is_that_of_the_real_compiler() -> None:
    class Grammar:
        mask_seconds = 0.0
        filled_at = 0.0

        def __init__(self) -> None:
            self.matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(SLOW), log_level=0)

        def fill(self, bitmask: list[bytes], index: int) -> None:
            bitmask[index] = self.matcher.compute_bitmask()

    grammar, masks = Grammar(), [b""]
    fill = timed(Grammar.fill)
    fill(grammar, masks, 0)
    assert any(masks[0])
    first = grammar.mask_seconds
    assert first > 0
    assert grammar.filled_at > 0
    # The lexer keeps its states, so the next mask of the same place is cheap.
    fill(grammar, masks, 0)
    assert first / 2 <= grammar.mask_seconds
