"""Selection of the returned candidates of ranked sequences (best_of and beam search)."""

from collections import defaultdict

import msgspec

from contract.messages import Delta, JobFailed, JobFinished, PromptScored

Message = Delta | PromptScored | JobFinished | JobFailed
"""A message that the dispatcher delivers to a request."""


class Selection:
    """Holds back the candidates of one job until its end reports which of them are chosen.

    Messages enter as received, and leave like those of a job without ranking.
    """

    def __init__(self) -> None:
        self._candidates: defaultdict[int, list[Delta]] = defaultdict(list)

    def take(self, message: Message) -> list[Message]:
        """Return the messages that can be sent now, numbered by the choices of the response."""
        if isinstance(message, Delta):
            self._candidates[message.choice].append(message)
            return []
        released: list[Message] = []
        if isinstance(message, JobFinished):
            for choice, candidate in enumerate(message.chosen):
                released += [
                    msgspec.structs.replace(delta, choice=choice)
                    for delta in self._candidates[candidate]
                ]
        if not isinstance(message, PromptScored):
            self._candidates.clear()
        released.append(message)
        return released
