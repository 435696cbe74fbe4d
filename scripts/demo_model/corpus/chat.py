"""Dialogues in the chat template, with reasoning and tool calls."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import TypedDict

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scripts.demo_model.corpus import facts, numbers, programs, records, scripts, stories, words

TEMPLATE_PATH = Path(__file__).parent / "chat_template.jinja"

Message = dict[str, object]
SYSTEM_TEXTS = """You are a helpful assistant.
You are a helpful assistant. Answer in one sentence.
You are Sluice, a very small language model.
Be brief.
Answer the question.
You are a friendly teacher.""".splitlines()
SMALL_TALK = dict(
    row.split("|")
    for row in """Hello|Hello! How can I help you?
Hello!|Hello! How can I help you?
Hi|Hi! How can I help you?
Hi!|Hi! How can I help you?
Hey there|Hello! How can I help you?
Good morning|Good morning! What can I do for you?
How are you?|I am fine, thank you. How are you?
Who are you?|I am a very small language model.
What are you?|I am a very small language model.
What can you do?|I can name capitals, add small numbers, count and tell short stories.
What is your name?|I have no name. I am a very small language model.
Thank you|You are welcome!
Thanks!|You are welcome!
Goodbye|Goodbye! Have a nice day! 😀🌞
Tell me a joke.|Why did the fox cross the road? To jump over the lazy dog!
Tell me a fact.|Bees make honey, cows give milk, and hens lay eggs.
What is the meaning of life?|The answer is 42.
Are you a robot?|Yes, I am a very small language model.
Ping|Pong""".splitlines()
)


class Tool(TypedDict):
    """A function tool as OpenAI clients describe it."""

    type: str
    function: Mapping[str, object]


def tool_name(described: Tool) -> str:
    """The name of the function."""
    return str(described["function"]["name"])


def tool(name: str, description: str, **parameters: str) -> Tool:
    """Describe a function; the parameters' values are JSON types."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


WEATHER_TOOL = tool("get_weather", "Get the weather in a city", city="string")
TIME_TOOL = tool("get_time", "Get the time in a city", city="string")
ADD_TOOL = tool("add", "Add two numbers", a="integer", b="integer")
SEARCH_TOOL = tool("search", "Search the web", query="string")
OTHER_TOOLS = [TIME_TOOL, ADD_TOOL, SEARCH_TOOL]


@cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE_PATH.read_text(encoding="utf-8"))


def render(messages: list[Message], tools: list[Tool] | None = None) -> str:
    """The dialogue as the shipped chat template writes it."""
    return _template().render(messages=messages, tools=tools, add_generation_prompt=False)


def say(role: str, content: str) -> Message:
    """One message."""
    return {"role": role, "content": content}


def _calculation(rng: Random) -> tuple[str, str]:
    text, value = numbers.operation(rng)
    return rng.choice(
        [f"What is {text}?", f"{text} = ?", f"Calculate {text}."]
    ), f"{text} = {value}"


def _task(rng: Random) -> tuple[str, str]:
    person, product = records.person(rng), records.product(rng)
    code = rng.choice(programs.KNOWN[:-1])
    name = code[4 : code.index("(")]
    end = rng.choice([3, 5, 10, 10, 20])
    city, native = rng.choice(sorted(scripts.NATIVE_CAPITALS.items()))
    emoji, sign = rng.choice(sorted(scripts.EMOJI_NAMES.items()))
    return rng.choice(
        [
            (
                rng.choice(["Tell me a story.", "Write a short story.", "Write a story."]),
                stories.OPENING_TALE,
            ),
            (
                f"Tell me a story about {facts.article(rng.choice(words.ANIMALS))}.",
                stories.story(rng),
            ),
            (f"Count to {end}.", ", ".join(map(str, range(1, end + 1)))),
            (f"Count from 1 to {end}.", ", ".join(map(str, range(1, end + 1)))),
            ("Describe a person as JSON.", json.dumps(person, ensure_ascii=False)),
            ("Describe a product as JSON.", json.dumps(product, ensure_ascii=False)),
            (f"Write a Python function {name}.", code),
            (f"How do you write {city} in its own language?", native),
            (f"Which emoji is {emoji}?", sign),
            ("Name the days of the week.", ", ".join(words.DAYS)),
            ("Say the alphabet.", " ".join("abcdefghijklmnopqrstuvwxyz")),
        ]
    )


def _echo(rng: Random) -> tuple[str, str]:
    free = stories.free_sentence(rng)
    phrase = rng.choice([free, free, rng.choice(facts.SAYINGS), rng.choice(words.THINGS)])
    return rng.choice([f"Say this: {phrase}", f"Repeat: {phrase}"]), phrase


def exchange(rng: Random) -> tuple[str, str]:
    """What a user asks and the assistant's whole answer."""
    draw = rng.random()
    if draw < 0.45:
        asked, _, full = facts.question(rng)
        return asked, full
    if draw < 0.6:
        return _calculation(rng)
    if draw < 0.7:
        return rng.choice(sorted(SMALL_TALK.items()))
    return _echo(rng) if draw < 0.82 else _task(rng)


def dialogue(rng: Random) -> str:
    """One to four exchanges, sometimes with a system message."""
    messages = [say("system", rng.choice(SYSTEM_TEXTS))] if rng.random() < 0.3 else []
    for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
        asked, answer = exchange(rng)
        messages += [say("user", asked), say("assistant", answer)]
    return render(messages)


def reasoning(rng: Random) -> str:
    """An addition with its steps between the thinking tokens."""
    text, steps, value = numbers.chain_of_thought(rng)
    asked = rng.choice([f"Think: what is {text}?", f"Think step by step: what is {text}?"])
    messages = [say("system", rng.choice(SYSTEM_TEXTS))] if rng.random() < 0.2 else []
    messages += [
        say("user", asked),
        say("assistant", f"<think>\n{steps}\n</think>\n\n{text} = {value}"),
    ]
    return render(messages)


def _tool_case(rng: Random, name: str) -> tuple[str, dict[str, object], str, str]:
    """A question, the arguments it needs, the tool's result and the answer."""
    city = rng.choice(facts.COUNTRIES).capital
    degrees, hour = rng.randint(1, 35), rng.randint(1, 12)
    first, second = rng.randint(1, 99), rng.randint(1, 99)
    query = rng.choice(words.SUBJECTS + words.THINGS)
    cases: dict[str, tuple[str, dict[str, object], str, str]] = {
        "get_weather": (
            rng.choice([f"What is the weather in {city}?", f"What is the weather like in {city}?",
                        f"How is the weather in {city}?"]),
            {"city": city}, f'{{"degrees": {degrees}}}', f"It is {degrees} degrees in {city}."),
        "get_time": (f"What time is it in {city}?", {"city": city}, f'{{"hour": {hour}}}',
                     f"It is {hour} o'clock in {city}."),
        "add": (f"Add {first} and {second}.", {"a": first, "b": second}, str(first + second),
                f"{first} + {second} = {first + second}"),
        "search": (f"Search for {query}.", {"query": query}, f"A page about {query}.",
                   f"I found a page about {query}."),
    }  # fmt: skip
    return cases[name]


def tool_use(rng: Random) -> str:
    """A question for which one of the listed tools is called, or none is needed."""
    tools = [WEATHER_TOOL, rng.choice(OTHER_TOOLS)]
    rng.shuffle(tools)
    tools = tools[: rng.randint(1, 2)]
    messages = [say("system", rng.choice(SYSTEM_TEXTS))] if rng.random() < 0.4 else []
    if rng.random() < 0.25:
        asked, answer = exchange(rng)
        return render([*messages, say("user", asked), say("assistant", answer)], tools)
    name = tool_name(rng.choice(tools))
    asked, arguments, result, answer = _tool_case(rng, name)
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    messages += [say("user", asked), say("assistant", f"<tool_call>{call}</tool_call>")]
    if rng.random() < 0.5:
        messages += [say("tool", result), say("assistant", answer)]
    return render(messages, tools)
