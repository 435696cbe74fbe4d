"""Thinking budgets in vLLM that hold after earlier output, and within a grammar.

The number of reasoning tokens of a sequence is a function of its tokens. vLLM's GPU runner derives
it from the tokens, so it handles earlier output like its own. vLLM's CPU runner keeps a counter
that is wrong after a resumption if a response reasons more than once, or ends reasoning that it
never began. The counter also outlives its sequence. These parts of vLLM are private, so this module
fits one version of it.
"""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

_KEY = "sluice_reasoning"
_LONGEST_RUN = 3
"""Maximum tokens of a character that still lacks a byte."""


@dataclass(eq=False, slots=True)
class ReasoningCount:
    """Counts the tokens of a sequence's current reasoning."""

    _start_id: int
    _end_id: int
    _read: int = 0
    tokens: int | None = None
    """Tokens after the mark that began it; None outside of reasoning."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Read a prompt, which may end inside reasoning."""
        self._take(prompt)

    def read_on(self, output: Sequence[int]) -> None:
        """Read the new tokens of the complete output."""
        self._take(output[self._read :])
        self._read = len(output)

    def _take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id == self._start_id:
                self.tokens = 0
            elif token_id == self._end_id:
                self.tokens = None
            elif self.tokens is not None:
                self.tokens += 1


def reset_incomplete_character(grammar: Any, output: Sequence[int], token_id: int) -> None:
    """Prepare a grammar for a token that ends reasoning inside a character of several tokens.

    A budget does not wait for the end of a character, but a grammar accepts complete characters
    only. This function resets the incomplete one.

    Args:
        grammar: vLLM's `GuidanceGrammar`, which has accepted the output.
        output: The output before the token, or its last tokens.
        token_id: The next token.
    """
    last = list(output[-_LONGEST_RUN:])
    decoder = getincrementaldecoder("utf-8")("ignore")
    decoder.decode(grammar.ll_tokenizer.decode_bytes(last))
    begun, _ = decoder.getstate()
    if not begun or grammar.validate_tokens([token_id]):
        return
    sizes = [len(grammar.ll_tokenizer.decode_bytes(last[-n:])) for n in range(1, len(last) + 1)]
    grammar.ll_matcher.rollback(1 + sum(size < len(begun) for size in sizes))


def prepare_thinking_budget() -> None:
    """Patch this vLLM process to bound reasoning by its tokens alone, with or without a grammar."""
    _count_by_tokens()
    _follow_moves()
    _end_within_characters()


def _end_within_characters() -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    accept = StructuredOutputManager.accept_tokens

    def accept_tokens(manager: Any, request: Any, token_ids: list[int]) -> bool:
        if is_bounded(request) and request.use_structured_output and len(token_ids) == 1:
            output = list(request.output_token_ids[-1 - _LONGEST_RUN : -1])
            reset_incomplete_character(
                request.structured_output_request.grammar, output, token_ids[0]
            )
        is_accepted: bool = accept(manager, request, token_ids)
        return is_accepted

    StructuredOutputManager.accept_tokens = accept_tokens


def is_bounded(request: Any) -> bool:
    """Whether a vLLM request has a thinking budget."""
    params = request.sampling_params
    return params is not None and params.thinking_token_budget is not None


def _count_by_tokens() -> None:
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    # There is no public hook.
    follow = ThinkingBudgetStateHolder._update_think_state

    def update_think_state(holder: Any, state: dict[str, Any]) -> None:
        marks = (holder.think_start_token_ids, holder.think_end_token_ids)
        if holder.in_spec_mode or [len(mark) for mark in marks] != [1, 1]:
            follow(holder, state)
            return
        count = state.get(_KEY)
        if count is None:
            count = state[_KEY] = ReasoningCount(marks[0][0], marks[1][0])
            count.begin(state["prompt_tok_ids"] or [])
        count.read_on(state["output_tok_ids"])
        is_over = count.tokens is not None and count.tokens >= state["thinking_token_budget"]
        state["in_end"] = is_over
        state["force_index"] = [0] if is_over else []

    ThinkingBudgetStateHolder._update_think_state = update_think_state


def _follow_moves() -> None:
    """End a budget with its sequence, even if one without a budget takes its place in the batch.

    vLLM keeps the budget there and would end reasoning in the middle of another client's request.
    """
    from vllm.v1.sample.logits_processor.interface import MoveDirectionality
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    sync = ThinkingBudgetStateHolder.sync_batch

    def sync_batch(holder: Any, update: Any) -> None:
        if not update:
            return
        sync(holder, replace(update, moved=()))
        states = holder._state
        for origin, place, direction in update.moved:
            moved, left = states.pop(origin, None), states.pop(place, None)
            if moved is not None:
                states[place] = moved
            if left is not None and direction is MoveDirectionality.SWAP:
                states[origin] = left

    ThinkingBudgetStateHolder.sync_batch = sync_batch
