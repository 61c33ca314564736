"""A Hub on loopback and an empty home, for tests in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hub_server
import pytest


@pytest.fixture
def hub() -> Iterator[hub_server.Hub]:
    with hub_server.running() as served:
        yield served


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, which is also the working directory."""
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / ".cache"))
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def online(hub: hub_server.Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> hub_server.Hub:
    """That Hub as the only one, with a cache of its own. huggingface_hub reads its environment once, when it is imported."""
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what comes is written when so much of it is there
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return hub
