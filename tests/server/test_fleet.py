"""The door of a fleet over replicas in this process: the same application on each, some of which die. No Ray, no engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.scripted import Scripted
from starlette.testclient import TestClient

from ninfer_jax.fleet.affinity import Affinity
from ninfer_jax.fleet.call import Call, Head
from ninfer_jax.fleet.front import ATTEMPTS, Lost, build_front
from ninfer_jax.fleet.policy import Replica as View
from ninfer_jax.fleet.policy import ranked
from ninfer_jax.fleet.replica import Replica
from ninfer_jax.fleet.reports import Report
from ninfer_jax.fleet.serve import planned, replicas_of
from ninfer_jax.server import Settings, build_app
from ninfer_jax.server.service import Service

SAID = "Hm.\n</think>\n\nHello there, and good day to you!<|im_end|>"
ASK = {"messages": [{"role": "user", "content": "Hi"}], "seed": 1}


class InProcess:
    """Replicas without Ray. dies: name -> parts of an answer after which it is lost, for as many answers as `deaths` says."""

    def __init__(self, settings: Settings, names: str = "012"):
        self.engines = {name: Scripted(lambda prompt: SAID, round=1) for name in names}
        self.replicas = {name: Replica(settings, lambda service, name: self.engines[name], name) for name in names}
        self.dies: dict[str, int] = {}
        self.sent: list[str] = []

    async def send(self, call: Call, affinity: Affinity) -> AsyncGenerator[Head | bytes, None]:
        views = [View(name, 4, prefixes=set(one.routing()["prefixes"])) for name, one in self.replicas.items()]
        name = ranked(affinity.key, affinity.chain, views)[0]
        self.sent.append(name)
        parts = self.replicas[name].answer(call, affinity)
        try:
            count = 0
            async for part in parts:
                if count >= self.dies.get(name, 1 << 30):
                    del self.replicas[name]
                    raise Lost(name)
                yield part
                count += 1
        finally:
            await parts.aclose()

    async def reports(self) -> list[Report]:
        return [await replica.report() for replica in self.replicas.values()]


@pytest.fixture
def fleet():
    def made(**settings) -> tuple[TestClient, InProcess]:
        engines = InProcess(Settings("tiny", **settings))
        return TestClient(build_front(Settings("tiny", **settings), engines), raise_server_exceptions=False), engines

    return made


def events(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_an_answer_is_that_of_the_application_itself(fleet):
    client, _ = fleet()
    alone = TestClient(build_app(Service(Settings("tiny"), Scripted(lambda prompt: SAID, round=1))))
    for path, body in (
        ("/v1/chat/completions", ASK),
        ("/v1/messages", {"model": "tiny", "messages": ASK["messages"], "max_tokens": 50}),
        ("/tokenize", {"content": "Hello"}),
        ("/v1/chat/completions", {"messages": "no"}),
        ("/v1/chat/completions", {"messages": ASK["messages"], "colour": 1}),
    ):
        one, two = client.post(path, json=body), alone.post(path, json=body)
        assert one.status_code == two.status_code
        varies = ("id", "created")
        assert {k: v for k, v in one.json().items() if k not in varies} == {k: v for k, v in two.json().items() if k not in varies}
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/nowhere").status_code == 404
    assert "<html" in client.get("/").text and client.get("/page/app.js").status_code == 200


def test_turns_of_a_conversation_go_to_one_replica_and_conversations_to_several(fleet):
    client, engines = fleet()
    homes = []
    for number in range(8):
        messages = [{"role": "user", "content": f"Talk {number}"}]
        where = set()
        for _ in range(2):
            answer = client.post("/v1/chat/completions", json={"messages": messages})
            where.add(answer.headers["x-ninfer-replica"])
            messages += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"}]
        assert len(where) == 1
        homes += where
    assert set(homes) == {"0", "1", "2"}
    assert engines.sent == [home for home in homes for _ in range(2)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_that_dies_before_it_has_said_anything_costs_nothing(fleet, stream):
    client, engines = fleet()
    home = client.post("/v1/chat/completions", json=ASK).headers["x-ninfer-replica"]
    engines.dies[home] = 0
    answer = client.post("/v1/chat/completions", json=ASK | {"stream": stream})
    assert answer.status_code == 200 and home not in engines.replicas
    if stream:
        said = "".join(e["choices"][0]["delta"].get("content", "") for e in events(answer.text) if e["choices"])
        assert said.startswith("Hello there")
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"][0]["message"]["content"].startswith("Hello there")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
def test_a_stream_whose_replica_dies_ends_with_an_error_of_its_api(fleet, path):
    client, engines = fleet()
    body = {
        "/v1/chat/completions": ASK,
        "/v1/messages": {"model": "tiny", "messages": ASK["messages"], "max_tokens": 90},
        "/v1/responses": {"input": "Hi"},
        "/v1/completions": {"prompt": "Hi", "max_tokens": 90},
    }[path]
    engines.dies = dict.fromkeys("012", 3)
    answer = client.post(path, json=body | {"stream": True})
    *begun, last = events(answer.text)
    assert answer.status_code == 200 and begun and "[DONE]" not in answer.text
    if path == "/v1/responses":
        assert last["type"] == "response.failed" and "ask again" in last["response"]["error"]["message"]
        assert last["sequence_number"] > max(event["sequence_number"] for event in begun)
    else:
        assert "ask again" in last["error"]["message"]
        assert (last.get("type") == "error") == (path == "/v1/messages") == ("event: error" in answer.text)
    assert len(engines.sent) == 1


def test_where_one_replica_after_the_other_dies_the_client_is_told(fleet):
    client, engines = fleet()
    engines.dies = dict.fromkeys("012", 0)
    answer = client.post("/v1/chat/completions", json=ASK)
    assert answer.status_code == 503 and answer.headers["retry-after"] and answer.json()["error"]["code"] == "replica_lost"
    assert len(engines.sent) == ATTEMPTS


def test_metrics_of_all_replicas_are_one_page(fleet):
    client, engines = fleet()
    for number in range(8):
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": str(number)}]})
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    (replicas,) = families["ninfer_replicas"].samples
    assert replicas.value == 3
    counted = {s.labels["replica"]: s.value for s in families["ninfer_answers"].samples if s.name == "ninfer_answers_total"}
    assert counted == {name: engines.sent.count(name) for name in set(engines.sent)} and sum(counted.values()) == 8
    assert {s.labels["replica"] for s in families["ninfer_slots"].samples} == {"0", "1", "2"}


def test_the_status_of_all_replicas_is_one_and_health_follows_them(fleet):
    client, engines = fleet()
    for number in range(5):
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": str(number)}]})
    status = client.get("/api/status").json()
    assert len(status["load"]["slots"]) == 12 and status["today"]["answers"] == 5 == len(status["recent"])
    assert [line["name"] for line in status["replicas"]] == ["0", "1", "2"] and status["phase"] == "ready"
    assert client.get("/health").json() == {"status": "ok", "replicas": 3}
    engines.replicas.clear()
    assert client.get("/health").status_code == 503 and client.get("/api/status").json()["phase"] == "loading"


def test_keys_are_asked_for_at_the_door(fleet):
    client, engines = fleet(api_keys=("secret",))
    assert client.post("/v1/chat/completions", json=ASK).status_code == 401
    assert client.get("/metrics").status_code == 401 and not engines.sent
    key = {"Authorization": "Bearer secret"}
    assert client.post("/v1/chat/completions", json=ASK, headers=key).status_code == 200
    assert len(client.get("/api/status", headers=key).json()["replicas"]) == 3


def test_a_body_that_is_too_large_reaches_no_replica(fleet):
    client, engines = fleet(max_body=100)
    assert client.post("/v1/chat/completions", json=ASK | {"user": "x" * 200}).status_code == 413 and not engines.sent


@pytest.mark.parametrize("text, found", [("3", (3, 3)), ("1-4", (1, 4)), ("auto", None)])
def test_numbers_of_replicas(text, found):
    assert replicas_of(text) == found


@pytest.mark.parametrize("text", ["0", "-1", "4-1", "two", "", "1.5", "99999"])
def test_what_is_no_number_of_replicas_is_refused(text):
    with pytest.raises(ValueError, match="--replicas is"):
        replicas_of(text)


def test_an_engine_has_a_card_or_cores_of_its_own():
    assert planned(None, 4, 64, 2, 8).most == 4 and planned(None, 4, 64, 2, 8).card
    assert planned((2, 2), 0, 6, 1, 8).cores == 3 and not planned((2, 2), 0, 6, 1, 8).card
    with pytest.raises(ValueError, match="--replicas asks for 3, this cluster has 2 cards"):
        planned((1, 3), 2, 64, 1, 8)
    with pytest.raises(ValueError, match="2 cores and no card"):
        planned((3, 3), 0, 2, 1, 8)
