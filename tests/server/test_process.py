"""The life of a server process: loading, signals, and clients who are slow on purpose."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ninfer_jax.server import process

TESTS = Path(__file__).resolve().parents[1]
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


@contextmanager
def server(**options) -> Iterator[tuple[subprocess.Popen, str]]:
    """(the process, its address)."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    command = [sys.executable, str(TESTS / "server/scripted_server.py"), json.dumps(options)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
    try:
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.wait()


def until_ready(address: str) -> None:
    for _ in range(600):
        if httpx.get(f"{address}/health").status_code == 200:
            return
        time.sleep(0.05)
    raise AssertionError("never ready")


def ended(child: subprocess.Popen) -> tuple[int, list[str]]:
    said, _ = child.communicate(timeout=30)
    return child.returncode, said.splitlines()


def test_health_tells_how_far_the_loading_is_and_an_answer_is_finished_after_the_signal():
    with server(load_s=3, round=1, round_s=0.1) as (child, address), httpx.Client(base_url=address) as client:
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "loading"
        assert health.json()["progress"]["weights"]["total"] == 4
        refused = client.post("/v1/chat/completions", json=ASK)
        assert refused.status_code == 503 and "weights" in refused.json()["error"]["message"] and refused.headers["retry-after"]
        until_ready(address)
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=ASK | {"stream": True}, timeout=20) as stream:
            lines = stream.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            time.sleep(0.4)
            refused = client.post("/v1/chat/completions", json=ASK)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
            assert [line for line in lines if line][-1] == "data: [DONE]"
        code, said = ended(child)
        assert code == 0 and said[-1] == "ended False True" and any("stopping; 1 answers" in line for line in said)


def test_a_signal_while_it_loads_ends_it_at_once():
    with server(load_s=20) as (child, address):
        assert httpx.get(f"{address}/health").status_code == 503
        child.send_signal(signal.SIGTERM)
        assert ended(child) == (0, ["ended True None"])


def test_what_stops_the_loading_ends_the_process():
    with server(fails="no such weights") as (child, _):
        code, said = ended(child)
        assert code != 0 and "ready" not in said


@pytest.mark.parametrize("again", [True, False])
def test_an_answer_that_takes_too_long_is_ended_in_its_own_words(again):
    """By the end of its time, or by a second signal."""
    settings = {"drain_seconds": 30 if again else 0.5}
    with server(round=1, round_s=0.1, said="so much to say " * 500, settings=settings) as (child, address):
        until_ready(address)
        with httpx.stream("POST", f"{address}/v1/messages", json=ASK | {"stream": True, "model": "tiny", "max_tokens": 4000}) as s:
            lines = s.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            if again:
                time.sleep(0.3)
                child.send_signal(signal.SIGINT)
            last = json.loads([line for line in lines if line.startswith("data:")][-1][5:])
        assert last["type"] == "error" and last["error"]["type"] == "overloaded_error"
        assert ended(child)[0] == 0


def test_a_reader_who_does_not_read_is_left_and_blocks_nobody():
    settings = {"send_seconds": 1.0}
    with server(round=8, said="word " * 3900, settings=settings, send_buffer=4096) as (child, address):
        until_ready(address)
        host, port = address.removeprefix("http://").split(":")
        body = json.dumps(ASK | {"stream": True, "logprobs": True, "top_logprobs": 2, "max_tokens": 3800})
        slow = socket.create_connection((host, int(port)))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        slow.sendall((head + body).encode())
        quick = httpx.post(f"{address}/v1/chat/completions", json=ASK | {"max_tokens": 20}, timeout=30)
        assert quick.status_code == 200
        for _ in range(400):
            if httpx.get(f"{address}/api/status").json()["running"] == 0:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("the slow reader still has its answers")
        slow.close()
        child.send_signal(signal.SIGTERM)
        assert ended(child)[0] == 0


def test_a_port_that_is_taken_is_one_line():
    with process.listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match="it is taken") as refused:
        process.listen("127.0.0.1", taken.getsockname()[1])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("no.such.host.invalid", 8080)])
def test_an_address_that_cannot_be_is_named(host, port):
    with pytest.raises((OSError, ValueError), match="--port is 70000" if port > 65535 else "--host no.such.host.invalid"):
        process.listen(host, port)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHos"])
def test_headers_that_never_come_are_not_waited_for(monkeypatch, sent):
    from server.conftest import on_a_port
    from server.scripted import Scripted

    from ninfer_jax.server import Service, Settings

    monkeypatch.setattr(process, "HEADER_SECONDS", 0.3)
    with on_a_port(Service(Settings("tiny"), Scripted(lambda _: "")), process.Connection) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(sent)
            assert slow.recv(1000) == b""
