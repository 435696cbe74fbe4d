"""Requests of the reference as code: curl, Python and Node."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gateway.dialects.endpoint import CHATS, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from gateway.dialects.profile_choice import DIALECT_HEADER

_OPENAI: Final[Mapping[str, str]] = {
    COMPLETIONS.path: "completions",
    CHATS.path: "chat.completions",
    RESPONSES.path: "responses",
    EMBEDDINGS.path: "embeddings",
}
"""Resources of OpenAI's clients by the paths that they call."""
_URL: Final = 'os.environ["SLUICE_URL"]'
_KEY: Final = 'os.environ["SLUICE_KEY"]'
_TOKEN: Final = re.compile(r'"(?:\\.|[^"\\])*"|true|false|null')
_WORDS: Final = {"true": "True", "false": "False", "null": "None"}
_OPENAI_PYTHON: Final = f"""import os

from openai import OpenAI

client = OpenAI(base_url={_URL} + "/v1", api_key={_KEY})
"""
_ANTHROPIC_PYTHON: Final = f"""import os

from anthropic import Anthropic

client = Anthropic(base_url={_URL}, auth_token={_KEY})
"""
_OPENAI_NODE: Final = """import OpenAI from "openai";

const { SLUICE_URL, SLUICE_KEY } = process.env;
const client = new OpenAI({ baseURL: `${SLUICE_URL}/v1`, apiKey: SLUICE_KEY });
"""
_ANTHROPIC_NODE: Final = """import Anthropic from "@anthropic-ai/sdk";

const { SLUICE_URL, SLUICE_KEY } = process.env;
const client = new Anthropic({ baseURL: SLUICE_URL, authToken: SLUICE_KEY });
"""


class Call(NamedTuple):
    """A request of an example."""

    method: str
    path: str
    body: Any = None
    file: str = ""
    """The name of the file with which the body is `multipart/form-data`; empty: it is JSON."""
    dialect: str = ""
    """The dialect that it has to name."""

    def samples(self) -> dict[str, str]:
        """Return the code by the name of its language."""
        return {"curl": self._curl(), "Python": self._python(), "Node": self._node()}

    @property
    def text(self) -> str:
        """The body as JSON."""
        return _written(self.body)

    @property
    def _resource(self) -> str:
        return "" if self.dialect or self.method != "POST" else _OPENAI.get(self.path, "")

    @property
    def _is_anthropic(self) -> bool:
        return (self.method, self.path) == ("POST", MESSAGES.path)

    def _curl(self) -> str:
        lines = [f'curl "$SLUICE_URL{self.path}"', '-H "Authorization: Bearer $SLUICE_KEY"']
        if self.method != ("GET" if self.body is None else "POST"):
            lines[0] = lines[0].replace("curl", f"curl -X {self.method}", 1)
        if self.file:
            lines += [f"-F {name}={value}" for name, value in self.body.items()]
            lines.append(f"-F file=@{self.file}")
        elif self.body is not None:
            lines.append('-H "Content-Type: application/json"')
            lines += [f'-H "X-Api-Dialect: {self.dialect}"'] if self.dialect else []
            quoted = self.text.replace("'", "'\\''").replace("\n", "\n  ")
            lines.append(f"-d '{quoted}'")
        return " \\\n  ".join(lines)

    def _python(self) -> str:
        if self._resource or self._is_anthropic:
            start = _ANTHROPIC_PYTHON if self._is_anthropic else _OPENAI_PYTHON
            named = "".join(f"    {name}={_literal(each)},\n" for name, each in self.body.items())
            resource = self._resource or "messages"
            return f"{start}response = client.{resource}.create(\n{named})\nprint(response)"
        headers = {"Authorization": "Bearer "}
        headers |= {DIALECT_HEADER: self.dialect} if self.dialect else {}
        written = _literal(headers).replace('Bearer "', f'Bearer " + {_KEY}')
        given = [f"{_URL} + {json.dumps(self.path)}", f"headers={written}"]
        if self.file:
            given += [f"data={_literal(self.body)}", f'files={{"file": open("{self.file}", "rb")}}']
        elif self.body is not None:
            given.append(f"json={_literal(self.body)}")
        lines = "".join(f"    {each},\n" for each in [*given, "timeout=600"])
        call = f"httpx.{self.method.lower()}(\n{lines})"
        return f"import os\n\nimport httpx\n\nresponse = {call}\nprint(response.text)"

    def _node(self) -> str:
        if self._resource or self._is_anthropic:
            start = _ANTHROPIC_NODE if self._is_anthropic else _OPENAI_NODE
            create = f"client.{self._resource or 'messages'}.create"
            return (
                f"{start}const response = await {create}({_written(self.body)});\n"
                "console.log(response);"
            )
        headers = {"Authorization": "KEY"}
        lines, start = [f'method: "{self.method}"'], ""
        if self.file:
            start = 'import { openAsBlob } from "node:fs";\n\nconst form = new FormData();\n'
            start += "".join(
                f"form.append({json.dumps(name)}, {json.dumps(value)});\n"
                for name, value in self.body.items()
            )
            start += f'form.append("file", await openAsBlob("{self.file}"), "{self.file}");\n'
        elif self.body is not None:
            headers["Content-Type"] = "application/json"
        headers |= {DIALECT_HEADER: self.dialect} if self.dialect else {}
        key = "`Bearer ${process.env.SLUICE_KEY}`"
        lines.append("headers: " + _indented(_written(headers).replace('"KEY"', key)))
        if self.file:
            lines.append("body: form")
        elif self.body is not None:
            lines.append(f"body: JSON.stringify({_indented(_written(self.body))})")
        options = "".join(f"  {each},\n" for each in lines)
        return (
            f"{start}const response = await fetch(`${{process.env.SLUICE_URL}}{self.path}`, "
            f"{{\n{options}}});\nconsole.log(await response.text());"
        )


def _written(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _literal(value: Any) -> str:
    """Return a value as Python, one level deep in a call."""
    written = json.dumps(value, indent=4, ensure_ascii=False)
    return _TOKEN.sub(lambda found: _WORDS.get(found[0], found[0]), written).replace("\n", "\n    ")


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")
