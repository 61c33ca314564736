"""What the server costs: one stream's tokens a second and its time to the first token, over HTTP and by `AsyncEngine` alone.

    python benchmarks/serving.py --model tiny --pairs 8 --tokens 200

One process has the engine and the server, as `ninfer-jax serve` has; the client is another. The two ways take turns, pair by pair,
so that the machine's other work meets both; medians, and the ratio of each pair. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time

CLIENT = """
import http.client, json, sys, time
host, port, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
link = http.client.HTTPConnection(host, port)
for line in sys.stdin:
    began = time.perf_counter()
    body = json.dumps({"prompt": json.loads(line), "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True,
                       "stream_options": {"include_usage": True}})
    link.request("POST", "/v1/completions", body)
    answer, first, usage = link.getresponse(), None, None
    while data := answer.readline():
        if data.startswith(b"data: {"):
            first = first or time.perf_counter()
            usage = json.loads(data[6:]).get("usage") or usage
    end = time.perf_counter()
    print(json.dumps([first - began, (usage["completion_tokens"] - 1) / (end - first)]), flush=True)
"""


def alone(engine, prompt: list[int], tokens: int) -> tuple[float, float]:
    """(seconds to the first token, tokens a second behind it)."""
    began, first, count = time.perf_counter(), None, 0
    params = engine.default_params(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    for piece in engine.submit(prompt, params):
        first = first or time.perf_counter()
        count += len(piece.tokens)
    assert first is not None
    return first - began, (count - 1) / (time.perf_counter() - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--draft", type=int, default=0)
    options = parser.parse_args()

    sys.setswitchinterval(5e-4)  # as `ninfer-jax serve` does

    from ninfer_jax import AsyncEngine, EngineConfig
    from ninfer_jax.server import Service, Settings
    from ninfer_jax.server.process import listen, serve_in

    config = EngineConfig(context=1024, slots=1, prefill_chunk=64, draft=options.draft, prefix_cache="off")
    engine = AsyncEngine.open(options.model, config)
    prompt = engine.text.tokenizer.encode("ROMEO.\nHow now, what news?")
    with listen("127.0.0.1", 0) as listening:
        host, port = listening.getsockname()
        server = serve_in(Service(Settings("model"), engine))
        loop = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        loop.start()
        clock = time.pthread_getcpuclockid(loop.ident or 0)
        command = [sys.executable, "-c", CLIENT, host, str(port), str(options.tokens)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdin and client.stdout
            pairs, before = [], 0.0
            for _ in range(options.pairs + 1):
                client.stdin.write(json.dumps(prompt) + "\n")
                client.stdin.flush()
                over = tuple(json.loads(client.stdout.readline()))
                before = before or time.clock_gettime(clock)
                pairs.append((alone(engine, prompt, options.tokens), over))
            client.stdin.close()
        cpu = time.clock_gettime(clock) - before
        server.should_exit = True
        loop.join(20)
    engine.close()
    pairs = pairs[1:]  # the first has warmed both
    median = statistics.median
    print(
        json.dumps(
            {
                "tokens_per_s": {"engine": median(a[1] for a, _ in pairs), "server": median(o[1] for _, o in pairs)},
                "first_token_ms": {"engine": 1e3 * median(a[0] for a, _ in pairs), "server": 1e3 * median(o[0] for _, o in pairs)},
                "speed_ratio": median(o[1] / a[1] for a, o in pairs),
                "first_token_more_ms": 1e3 * median(o[0] - a[0] for a, o in pairs),
                "server_thread_cpu_ms_a_token": 1e3 * cpu / (options.pairs * options.tokens),
                "pairs": len(pairs),
                "tokens": options.tokens,
                "draft": options.draft,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
