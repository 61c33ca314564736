"""What a streamed event costs the server's event loop: microseconds of its thread, over an engine that says a token at once.

    python benchmarks/event_path.py --tokens 4000 --runs 5

No model runs. The server is that of `ninfer-jax serve`, the client another process; what is measured is the CPU time of the thread
that has the loop, so other work on the machine disturbs it little. The least of the runs. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

CLIENT = """
import http.client, sys
link = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]))
for line in sys.stdin:
    path, body = line.rstrip("\\n").split(" ", 1)
    link.request("POST", path, body)
    answer, events = link.getresponse(), 0
    while data := answer.readline():
        events += data.startswith(b"data:")
    print(events, flush=True)
"""


class AtOnce:
    """The running request of `Instant`: an event's wait each, and no work."""

    prompt_tokens = prefilled = 1

    def __init__(self, token: int, tokens: int):
        self._token, self._tokens, self._wanted = token, tokens, True

    async def __aiter__(self) -> AsyncIterator[Any]:
        from ninfer_jax.engine.results import Completion, Delta, Stats

        loop = asyncio.get_running_loop()
        for at in range(self._tokens):
            come = loop.create_future()  # as a reader waits for the engine's thread
            loop.call_soon(come.set_result, None)
            await come
            last = at == self._tokens - 1
            done = Completion([], "", "", "length", 1, None, Stats()) if last else None
            yield Delta("", "", [self._token], [], done)

    def cancel(self) -> None:
        self._wanted = False


class Instant:
    """A backend without a model."""

    context = 1 << 20

    def __init__(self) -> None:
        from ninfer_jax.engine.requests import Requests
        from ninfer_jax.model_path import tiny_path
        from ninfer_jax.text import open_text

        self.text = open_text(tiny_path(), 2048)
        self._requests = Requests(self.text, self.context, self.context, 2048)
        self._token = self.text.tokenizer.encode(" the")[0]

    def default_params(self, **changes: Any) -> Any:
        return self._requests.default_params(**changes)

    def submit(self, prompt: list[int], params: Any, **_: Any) -> AtOnce:
        return AtOnce(self._token, params.max_new_tokens)

    def load(self) -> Any:
        from ninfer_jax.engine.load import Load

        return Load([], 0, 0, 1, {})

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self, save: bool = True) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()

    from ninfer_jax.server import Service, Settings
    from ninfer_jax.server.process import listen, serve_in

    chat = {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": options.tokens, "stream": True}
    routes = {
        "/v1/completions": {"prompt": "Hi", "max_tokens": options.tokens, "stream": True},
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": "Hi", "max_output_tokens": options.tokens, "stream": True},
    }
    found: dict[str, float] = {}
    with listen("127.0.0.1", 0) as listening:
        host, port = listening.getsockname()
        service = Service(Settings("model"))
        service.ready(Instant())
        server = serve_in(service)
        loop = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        loop.start()
        clock = time.pthread_getcpuclockid(loop.ident or 0)
        command = [sys.executable, "-c", CLIENT, host, str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdin and client.stdout
            for route, body in routes.items():
                costs = []
                for _ in range(options.runs):
                    before = time.clock_gettime(clock)
                    client.stdin.write(f"{route} {json.dumps(body)}\n")
                    client.stdin.flush()
                    events = int(client.stdout.readline())
                    assert events >= options.tokens - 1, (route, events)
                    costs.append((time.clock_gettime(clock) - before) / events)
                found[route] = round(1e6 * min(costs), 1)
            client.stdin.close()
        server.should_exit = True
        loop.join(20)
    print(json.dumps({"loop_us_an_event": found, "tokens": options.tokens, "runs": options.runs}, indent=1))


if __name__ == "__main__":
    main()
