"""A conversation of two turns by the tool runner of Anthropic's SDK, at its defaults."""

import json
import os
import sys

import anthropic


@anthropic.beta_tool
def look(place: str) -> str:
    """Look at a place.

    Args:
        place: The place.
    """
    return f"{place} is green."


runner = anthropic.Anthropic().beta.messages.tool_runner(
    model=os.environ["MODEL"],
    max_tokens=64,
    tools=[look],
    messages=[{"role": "user", "content": "How is the garden?"}],
)
json.dump([block.to_dict() for block in runner.until_done().content], sys.stdout)
