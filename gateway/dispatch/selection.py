"""Which of several candidates are returned, where sequences are ranked."""

from collections import defaultdict

import msgspec

from contract.messages import Delta, JobFailed, JobFinished, PromptScored

Message = Delta | PromptScored | JobFinished | JobFailed
"""What one job's gateway tells a request."""


class Selection:
    """Holds back what the candidates of one job say until its end tells which of them are chosen.

    Messages go in as they were received, and come out as those of a job without ranking.
    """

    def __init__(self) -> None:
        self._candidates: defaultdict[int, list[Delta]] = defaultdict(list)

    def take(self, message: Message) -> list[Message]:
        """Return what can be told now, with the choices that the client knows."""
        if isinstance(message, Delta):
            self._candidates[message.choice].append(message)
            return []
        told: list[Message] = []
        if isinstance(message, JobFinished):
            for choice, candidate in enumerate(message.chosen):
                told += [
                    msgspec.structs.replace(delta, choice=choice)
                    for delta in self._candidates[candidate]
                ]
        if not isinstance(message, PromptScored):
            self._candidates.clear()
        told.append(message)
        return told
