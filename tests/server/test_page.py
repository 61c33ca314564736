"""The page: it comes whole from the package, asks nothing of anybody else, and its parts fit together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ninfer_jax.server

FOLDER = Path(ninfer_jax.server.__file__).parent / "page"
FILES = sorted(path.name for path in FOLDER.iterdir())
SCRIPTS = [name for name in FILES if name.endswith(".js")]


def test_the_page_and_its_files_are_served_without_a_key_and_nothing_else_is(make):
    client, _, _ = make(settings={"api_keys": ("key",)})
    index = client.get("/")
    assert index.status_code == 200 and index.headers["content-type"].startswith("text/html")
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', index.text))
    named |= {name for script in SCRIPTS for name in re.findall(r'from "\./([^"]+)"', (FOLDER / script).read_text("utf-8"))}
    assert named == set(FILES) - {"index.html"}
    for name in named:
        answer = client.get(f"/page/{name}")
        assert answer.status_code == 200 and answer.content == (FOLDER / name).read_bytes()
        assert "javascript" in answer.headers["content-type"] or not name.endswith(".js")
    for path in ("/page/nothing.js", "/page/../pages.py", "/page/..%2fpages.py", "/page/__init__.py"):
        assert client.get(path).status_code in (401, 404)


def test_a_browser_is_told_to_fetch_from_here_alone(make):
    client, _, _ = make()
    policy = dict(part.strip().split(" ", 1) for part in client.get("/").headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_place_or_runs_text_as_code(name):
    text = (FOLDER / name).read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//cdn|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", text)
    if name.endswith(".html"):
        assert not re.search(r"\son\w+=|style=|<script(?! type=\"module\" src)", text), "the policy would not let it run"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_asks_for_elements_that_there_are(name):
    index = (FOLDER / "index.html").read_text("utf-8")
    there = set(re.findall(r'id="([^"]+)"', index))
    asked = set(re.findall(r'\$\("([\w-]+)"\)', (FOLDER / name).read_text("utf-8")))
    assert asked <= there and len(there) == len(re.findall(r'id="', index))


def test_the_dashboards_numbers_are_there(make):
    client, _, _ = make(cached=3)
    ask = {"messages": [{"role": "user", "content": "Hi"}]}
    used = client.post("/v1/chat/completions", json=ask).json()["usage"]
    status = client.get("/api/status").json()
    assert status["tokens"] == status["totals"]["new_tokens"] == status["today"]["completion_tokens"] == used["completion_tokens"]
    assert status["totals"]["cached_tokens"] == status["today"]["cached_tokens"] == 3 and status["today"]["answers"] == 1
    assert len(status["load"]["slots"]) == 4 and status["recent"][0]["prompt_tokens"] == used["prompt_tokens"]
    assert "Hi" not in client.get("/api/status").text.replace("High", "")
    assert b"ninfer_pages_used 3.0" in client.get("/metrics").content
