"""Process with vLLM's offline `LLM`, which completes the prompts of a load at once.

`bench.gpu` starts it. The arguments are a port of loopback and vLLM's arguments as JSON. Each POST
has `{"prompts": [...], "tokens": ..., "temperature": ...}`. The reply lists the completion tokens
of each prompt, and the seconds until its first token: `[[128, 0.25], ...]`.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from typing_extensions import override


class _Handler(BaseHTTPRequestHandler):
    llm: Any

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        load = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._reply(self._complete(**load))

    def _complete(
        self, prompts: list[str], tokens: int, temperature: float
    ) -> list[tuple[int, float]]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=temperature)
        results = self.llm.generate(prompts, params, use_tqdm=False)
        return [
            (len(each.outputs[0].token_ids), each.metrics.first_token_latency) for each in results
        ]

    def _reply(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""


def main() -> None:
    """Load the model, then serve until the end of the process."""
    from vllm import LLM

    port, arguments = int(sys.argv[1]), json.loads(sys.argv[2])
    # Its statistics have the times of first tokens.
    _Handler.llm = LLM(**arguments, disable_log_stats=False)
    HTTPServer(("127.0.0.1", port), _Handler).serve_forever()


if __name__ == "__main__":
    main()
