"""Load on a server, and what came of it: mixed requests from several clients, some cancelled, malformed, too long or read slowly.

    ninfer-jax serve tiny --slots 4 &
    python examples/serving/load.py --requests 2000 --clients 8 --cancelled 0.2 --malformed 0.1

Every finished answer is compared with the same request alone, asked before; afterwards slots and pages have to be free, and the
server's memory, file handles and threads where they were (`--pid`). Exit 1 if anything is wrong. It needs `pip install httpx`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import sys
import time
from pathlib import Path

import httpx

PROMPTS = [
    "ROMEO.",
    "Enter the King and",
    "def main():",
    "import os\n\n",
    "What is love?",
    "JULIET.\nO",
    "class Queue:",
    "The end of the",
]
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
BROKEN = [
    b"{",
    b"[]",
    b'{"messages": 5}',
    b'{"prompt": "x", "max_tokens": "many"}',
    b'{"model": "tiny", "colour": 1}',
    b"\xff",
    b"[" * 9999,
]


def request(rng: random.Random, context: int) -> tuple[str, dict]:
    """A route and a body whose answer is the same each time: greedy, or with a seed."""
    route, text, tokens = rng.choice(ROUTES), rng.choice(PROMPTS), rng.randint(1, 60)
    draw = {"temperature": 0} if rng.random() < 0.5 else {"temperature": 1.0, "seed": rng.randrange(4)}
    if route == "/v1/completions":
        return route, {"prompt": text * rng.choice([1, 1, context // 40]), "max_tokens": tokens, **draw}
    messages = [{"role": "user", "content": text}]
    if route == "/v1/responses":
        return route, {"input": messages, "max_output_tokens": tokens, "reasoning": {"max_tokens": 10}, **draw}
    if route == "/v1/messages":
        draw.pop("temperature", None)
        return route, {"model": "tiny", "messages": messages, "max_tokens": tokens, "seed": draw.get("seed", 1)}
    return route, {"messages": messages, "max_tokens": tokens, "thinking_budget": 10, **draw}


def words(route: str, body: dict) -> str:
    """All that an answer says, without names and times."""
    if route == "/v1/responses":
        return json.dumps([item.get("content") or item.get("arguments") for item in body["output"]])
    if route == "/v1/messages":
        return json.dumps(body["content"])
    return json.dumps([choice.get("text") or choice.get("message") for choice in body["choices"]])


def streamed_words(route: str, lines: list[str]) -> tuple[int, bool]:
    """(events, whether the stream came to its proper end) of a streamed answer."""
    data = [line[5:].strip() for line in lines if line.startswith("data:")]
    last = data[-1] if data else ""
    ended = last == "[DONE]" or any(word in last for word in ("message_stop", "response.completed", "response.incomplete"))
    return len(data), ended


class Load:
    def __init__(self, options: argparse.Namespace):
        self.options, self.rng = options, random.Random(options.seed)
        self.headers = {"authorization": f"Bearer {options.key}"} if options.key else {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.first: list[float] = []
        self.tokens = 0

    async def main(self) -> int:
        async with httpx.AsyncClient(base_url=self.options.url, headers=self.headers, timeout=300) as client:
            status = (await client.get("/api/status")).json()
            self.context = status["model"]["max_model_len"]
            distinct = [request(self.rng, self.context) for _ in range(self.options.distinct)]
            self.alone = [(route, body, words(route, (await client.post(route, json=body)).json())) for route, body in distinct]
            self.before = self.process()
        began, left = time.perf_counter(), collections.deque(range(self.options.requests))
        await asyncio.gather(*(self.client(left) for _ in range(self.options.clients)))
        seconds = time.perf_counter() - began
        await self.afterwards()
        first = sorted(self.first)
        said = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        print(f"{sum(self.counts.values())} requests in {seconds:.0f} s: {said}")
        print(f"{self.tokens / seconds:.1f} tokens/s, first token median {first[len(first) // 2]:.3f} s, last {first[-1]:.3f} s")
        for line in self.wrong[:20]:
            print("WRONG", line)
        return 1 if self.wrong else 0

    async def client(self, left: collections.deque[int]) -> None:
        async with httpx.AsyncClient(base_url=self.options.url, headers=self.headers, timeout=300) as client:
            while left:
                left.popleft()
                try:
                    await self.one(client)
                except httpx.TransportError as error:
                    self.wrong.append(f"{type(error).__name__} {error}")

    async def one(self, client: httpx.AsyncClient) -> None:
        draw, options = self.rng.random(), self.options
        if draw < options.malformed:
            return self.refused(await client.post(self.rng.choice(ROUTES), content=self.rng.choice(BROKEN)), "malformed")
        if draw < options.malformed + options.too_long:
            return self.refused(await client.post("/v1/completions", json={"prompt": [1] * (self.context + 1)}), "too long")
        route, body, alone = self.rng.choice(self.alone)
        if draw < options.malformed + options.too_long + options.cancelled:
            return await self.cancelled(client, route, body)
        if self.rng.random() < 0.5:
            return await self.streamed(client, route, body)
        began = time.perf_counter()
        answer = await client.post(route, json=body)
        if self.busy(answer.status_code):
            return None
        if answer.status_code != 200 or words(route, answer.json()) != alone:
            self.wrong.append(f"{route} {body}: {answer.status_code} {answer.text[:200]} instead of {alone[:200]}")
        self.counts["whole"] += 1
        self.first.append(time.perf_counter() - began)
        usage = answer.json().get("usage", {})
        self.tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        return None

    async def cancelled(self, client: httpx.AsyncClient, route: str, body: dict) -> None:
        self.counts["cancelled"] += 1
        async with client.stream("POST", route, json=body | {"stream": True}) as answer:
            async for _ in answer.aiter_lines():
                if self.rng.random() < 0.3:
                    break
            await asyncio.sleep(0)

    async def streamed(self, client: httpx.AsyncClient, route: str, body: dict) -> None:
        slow = self.rng.random() < self.options.slow
        began, lines = time.perf_counter(), []
        async with client.stream("POST", route, json=body | {"stream": True}) as answer:
            if self.busy(answer.status_code):
                return
            async for line in answer.aiter_lines():
                if line.startswith("data:") and len(lines) == 0:
                    self.first.append(time.perf_counter() - began)
                lines.append(line)
                if slow:
                    await asyncio.sleep(0.02)
        self.counts["streamed slowly" if slow else "streamed"] += 1
        events, ended = streamed_words(route, lines)
        self.tokens += events
        if answer.status_code != 200 or not ended:
            self.wrong.append(f"{route} {body}: the stream ended with {lines[-2:]}")

    def busy(self, status: int) -> bool:
        self.counts["asked to come back"] += status == 429
        return status == 429

    def refused(self, answer: httpx.Response, what: str) -> None:
        self.counts[what] += 1
        if answer.status_code != 400 or "\n" in answer.json()["error"]["message"]:
            self.wrong.append(f"{what}: {answer.status_code} {answer.text[:200]}")

    async def afterwards(self) -> None:
        """Nothing is left of all that: not in the engine, not in the process."""
        async with httpx.AsyncClient(base_url=self.options.url, headers=self.headers, timeout=60) as client:
            for _ in range(200):
                status = (await client.get("/api/status")).json()
                if not status["running"] and all(slot["state"] == "free" for slot in status["load"]["slots"]):
                    break
                await asyncio.sleep(0.1)
            else:
                self.wrong.append(f"{status['running']} answers still run, slots {status['load']['slots']}")
        after = self.process()
        for name, before in self.before.items():
            # What a warm process needs more of than a fresh one: buffers, a few kept connections.
            if after[name] > before * 1.25 + {"MiB": 200, "files": 40, "threads": 8}[name]:
                self.wrong.append(f"{name}: {before} before, {after[name]} after")
        if self.before:
            print(", ".join(f"{name} {self.before[name]} -> {after[name]}" for name in after))

    def process(self) -> dict[str, int]:
        """Memory, file handles and threads of the server's process, where its number is given and /proc tells."""
        if not self.options.pid:
            return {}
        place = Path("/proc") / str(self.options.pid)
        values = dict(line.split(":\t", 1) for line in (place / "status").read_text().splitlines() if ":\t" in line)
        return {
            "MiB": int(values["VmRSS"].split()[0]) // 1024,
            "files": len(os.listdir(place / "fd")),
            "threads": int(values["Threads"]),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--key", default=os.environ.get("NINFER_API_KEY", ""))
    parser.add_argument("--pid", type=int, default=0, help="the server's process, to look at its memory, files and threads")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--distinct", type=int, default=40, help="different requests, each asked alone first")
    parser.add_argument("--seed", type=int, default=0)
    for name, share in (("cancelled", 0.2), ("malformed", 0.1), ("too-long", 0.05), ("slow", 0.1)):
        parser.add_argument(f"--{name}", type=float, default=share, help="a share of the requests")
    return asyncio.run(Load(parser.parse_args()).main())


if __name__ == "__main__":
    sys.exit(main())
