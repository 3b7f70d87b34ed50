"""An OpenAI-compatible judge on the loopback interface, for tests of alpaca_eval without a network.

Answers `POST .../chat/completions` with the log-probabilities of `m` and `M` that a rule gives to
the two outputs it finds in alpaca_eval's prompt. Keeps every request. It knows nothing of the
post-processing under test.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A rule maps (instruction, output of m, output of M) to {token: probability}.
Rule = Callable[[str, str, str], dict[str, float]]

PROMPT = re.compile(
    r'"instruction": """(?P<instruction>.*?)""",\n}'
    r'.*?"model_identifier": "m",\s+"output": """(?P<m>.*?)"""\s+}'
    r'.*?"model_identifier": "M",\s+"output": """(?P<M>.*?)"""\s+}',
    re.DOTALL,
)


def prefer_longer(instruction: str, m: str, big_m: str) -> dict[str, float]:
    """m wins with probability sigmoid(difference of lengths / 10)."""
    chance = 1 / (1 + math.exp((len(big_m) - len(m)) / 10))
    return {"m": chance, "M": 1 - chance}


class JudgeServer:
    """`with JudgeServer() as judge: judge.url`; `statuses` are HTTP errors to give first."""

    def __init__(self, rule: Rule = prefer_longer, statuses: tuple[int, ...] = ()) -> None:
        self.rule = rule
        self.statuses = list(statuses)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> JudgeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
            status = self.statuses.pop(0) if self.statuses else 200
        if status != 200:
            message = "rate limit reached" if status == 429 else "the judge is out of order"
            return status, {"error": {"message": f"{message}, key {headers.get('authorization')}"}}
        if not path.endswith("/chat/completions"):
            return 404, {"error": {"message": f"no {path}"}}
        found = PROMPT.search(body["messages"][-1]["content"])
        if found is None:
            return 400, {"error": {"message": "not alpaca_eval's prompt"}}
        return 200, completion(self.rule(found["instruction"], found["m"], found["M"]), body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # the name is http.server's
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                headers = {key.lower(): value for key, value in self.headers.items()}
                status, reply = judge.answer(self.path, headers, body)
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Silent: the tests read `requests`."""

        return Handler


def completion(chances: dict[str, float], body: dict[str, Any]) -> dict[str, Any]:
    """A reply with one token and the log-probabilities of the most likely ones."""
    top = [
        {"token": token, "logprob": math.log(max(chance, 1e-30)), "bytes": list(token.encode())}
        for token, chance in sorted(chances.items(), key=lambda item: -item[1])
    ][: body.get("top_logprobs", 5)]
    token = top[0]["token"]
    return {
        "id": "judge-1",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "message": {"role": "assistant", "content": token},
                "logprobs": {"content": [{**top[0], "top_logprobs": top}]},
            }
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11},
    }
