"""Models of the Hub: what is fetched, that it goes on where it was cut, and each refusal in one line.
The Hub is a server on loopback that counts what it serves."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import hub_server
import pytest
from hub_server import Hub, Repository

from ninfer_jax.files import FileError
from ninfer_jax.models import HubName, for_shapes, hub, kept
from ninfer_jax.models.hub import Snapshot

NAME = HubName("org/name")
CONFIG = json.dumps({"model_type": "qwen3_5_text"}).encode()
SHARDS = {f"model-{i}.safetensors": hashlib.sha256(bytes([i])).digest() * 2000 for i in range(3)}
INDEX = json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(SHARDS)}}).encode()
FILES = {"config.json": CONFIG, "tokenizer.json": b"{}" * 3000, "model.safetensors.index.json": INDEX, **SHARDS}
OTHERS = {"README.md": b"read", "modeling_name.py": b"raise SystemExit", "pytorch_model.bin": b"\x80\x04" * 9000}


@pytest.fixture
def repository(online: Hub) -> Repository:
    online.repositories["org/name"] = made = Repository({**FILES, **OTHERS})
    return made


def fetched(name: HubName = NAME, **options: bool) -> tuple[Snapshot, list[str]]:
    said: list[str] = []
    return hub.fetch(name, said.append, lambda *_: None, **options), said


def contents(snapshot: Snapshot) -> dict[str, bytes]:
    return {p.relative_to(snapshot.folder).as_posix(): p.read_bytes() for p in snapshot.folder.rglob("*") if p.is_file()}


def refusal(name: HubName = NAME) -> str:
    with pytest.raises(FileError) as caught:
        fetched(name)
    message = str(caught.value)
    assert "\n" not in message and str(name) in message, message
    return message


def nothing_half_made(home: Path) -> None:
    assert hub.recorded(NAME) is None
    assert all(p.resolve().stat().st_size for p in home.rglob("snapshots/*/*"))


def test_the_files_that_are_needed_come_once_and_whole(online: Hub, repository: Repository) -> None:
    progress: list[tuple[str, int, int]] = []
    said: list[str] = []
    snapshot = hub.fetch(NAME, said.append, lambda *told: progress.append(told))
    assert contents(snapshot) == FILES and snapshot.whole and snapshot.source == snapshot.folder and not snapshot.quantised
    assert online.served == {f"org/name/{name}": len(content) for name, content in FILES.items()}
    (line,) = said
    assert "org/name (commit aaaaaaaa)" in line and "6 files" in line and "are free" in line and online.url in line
    stages, done, totals = zip(*progress, strict=True)
    assert set(stages) == {"download"} and sorted(done) == list(done) and done[-1] == totals[-1]
    asked = len(online.asked)
    assert fetched() == (snapshot, []) and len(online.asked) == asked  # nobody is asked again


def test_huggingface_hub_takes_the_files_for_its_own(online: Hub, repository: Repository) -> None:
    from huggingface_hub import snapshot_download

    snapshot, _ = fetched()
    served = dict(online.served)
    assert Path(snapshot_download("org/name", allow_patterns=list(FILES), local_files_only=True)) == snapshot.folder
    snapshot_download("org/name", allow_patterns=list(FILES))
    assert online.served == served


def test_what_huggingface_hub_has_is_not_fetched_again(online: Hub, repository: Repository) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download("org/name", "model-1.safetensors")
    _, (line,) = fetched()
    assert "64.1 KB of that are here" in line  # with the index, which comes first
    assert online.served["org/name/model-1.safetensors"] == len(SHARDS["model-1.safetensors"])


def test_a_connection_that_breaks_goes_on_where_it_was(online: Hub, repository: Repository) -> None:
    repository.cut["model-1.safetensors"] = [10_000, 20_000]
    snapshot, _ = fetched()
    assert contents(snapshot) == FILES
    assert online.served["org/name/model-1.safetensors"] == len(SHARDS["model-1.safetensors"])


def test_a_fetch_that_was_given_up_goes_on_in_the_midst_of_a_file(online: Hub, repository: Repository, home: Path) -> None:
    repository.cut["model-1.safetensors"] = [10_000, *[0] * 20]  # then nothing more comes
    assert "cannot be reached" in refusal()
    nothing_half_made(home)
    repository.cut.clear()
    served = online.served["org/name/model-1.safetensors"]
    assert served == 10_000
    snapshot, (line,) = fetched()
    assert contents(snapshot) == FILES and "of that are here" in line
    assert online.served["org/name/model-1.safetensors"] == len(SHARDS["model-1.safetensors"])


def test_content_that_is_not_what_is_listed_is_removed(online: Hub, repository: Repository, home: Path) -> None:
    repository.wrong.add("model-2.safetensors")
    message = refusal(NAME)
    assert "what came for model-2.safetensors is not what the repository lists" in message and "HF_ENDPOINT" in message
    nothing_half_made(home)
    # Other files, which were given up in their midst, may have left their beginnings to be gone on with.
    listed = hub_server.digest(SHARDS["model-2.safetensors"])
    assert not list(home.rglob(f"{listed}*"))
    repository.wrong.clear()
    assert contents(fetched()[0]) == FILES


def test_bytes_of_another_content_at_the_beginning_are_found(online: Hub, repository: Repository, home: Path) -> None:
    """A partial file whose beginning is not the file's: the whole is compared, not only what came."""
    blobs = hub.repository("org/name") / "blobs"
    blobs.mkdir(parents=True)
    digest = hub_server.digest(SHARDS["model-0.safetensors"])
    (blobs / f"{digest}.ninfer-jax.partial").write_bytes(b"x" * 1000)
    assert "model-0.safetensors is not what the repository lists" in refusal()
    assert contents(fetched()[0]) == FILES


def test_without_a_network_what_was_fetched_is_used(online: Hub, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    snapshot, _ = fetched()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert fetched() == (snapshot, [])
    there, (line,) = fetched(again=True)
    assert there.files == snapshot.files and "cannot be reached" in line and "going on with commit aaaaaaaa" in line
    shutil.rmtree(kept.root())  # what another program fetched has no record
    there, (line,) = fetched()
    assert there.files == snapshot.files and "whole in" in line
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    there, (line,) = fetched()
    assert there.files == snapshot.files and "HF_HUB_OFFLINE" in line
    (snapshot.folder / "model-1.safetensors").unlink()
    assert "HF_HUB_OFFLINE forbids to fetch it" in refusal()


def test_a_newer_commit_comes_when_it_is_asked_for(online: Hub, repository: Repository) -> None:
    first, _ = fetched()
    online.repositories["org/name"] = Repository({**FILES, "config.json": CONFIG + b" "}, commit="c" * 40)
    assert fetched()[0] == first
    second, said = fetched(again=True)
    assert second.commit == "c" * 40 and said[-1] == "org/name was aaaaaaaa and is now cccccccc"
    assert fetched()[0] == second
    assert online.served["org/name/model-1.safetensors"] == len(SHARDS["model-1.safetensors"])  # the same blob


def test_revisions_are_apart(online: Hub, repository: Repository) -> None:
    online.repositories["org/name"] = Repository(FILES, revisions=("main", "v1"))
    assert fetched(HubName("org/name", "v1"))[0].name.revision == "v1"
    assert fetched(HubName("org/name", "a" * 40))[0].commit == "a" * 40
    message = refusal(HubName("org/name", "v2"))
    assert "org/name has no revision 'v2'" in message and len(hub.records()) == 2


def test_for_shapes_no_weight_comes(online: Hub, repository: Repository) -> None:
    place = for_shapes("org/name", lambda line: None, lambda *_: None)
    assert isinstance(place, Path) and {p.name for p in place.iterdir()} == {"config.json", "tokenizer.json"}
    assert hub.recorded(NAME) is None


def test_of_gguf_files_the_one_that_is_named(online: Hub, repository: Repository) -> None:
    models = {f"x-{kind}.gguf": b"GGUF" + kind.encode() * 4000 for kind in ("Q4_0", "Q8_0")}
    online.repositories["org/name"] = Repository(models)
    assert "choose one: org/name:x-Q4_0.gguf (16.0 KB), org/name:x-Q8_0.gguf (16.0 KB)" in refusal()
    assert not online.served
    snapshot, _ = fetched(HubName("org/name", file="Q8_0"))
    assert snapshot.source.name == "x-Q8_0.gguf" and snapshot.quantised and list(online.served) == ["org/name/x-Q8_0.gguf"]
    with pytest.raises(FileError, match="has its config inside x-Q8_0.gguf: fetch that first, `ninfer-jax models fetch org/name:x"):
        for_shapes("org/name:x-Q8_0.gguf", lambda line: None, lambda *_: None)


def test_tokens_go_to_the_hub_and_nowhere_else(online: Hub, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.token = "hf_mine"
    assert "no such repository, or it is private" in refusal() and "HF_TOKEN" in refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "refuses the token (401)" in refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    online.at_cdn.clear()
    assert contents(fetched()[0]) == FILES
    assert online.at_cdn == {""}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gated": True}, "org/name is gated: accept its conditions on http"),
        ({"status": 503}, "fails (503): try again later, or set HF_ENDPOINT to a mirror"),
        ({"status": 429}, "too many requests (429)"),
        ({"status": 403}, "forbids it (403)"),
        ({"files": OTHERS}, "holds no model: its weights are .bin"),
        ({"files": SHARDS}, "3 .safetensors files but no model.safetensors.index.json"),
        ({"files": {"model.safetensors": b"x" * 9000}}, "holds weights but no config.json"),
        ({"files": {"../../evil": b"x"}}, "lists a file '../../evil', which is no name in a repository: nothing is fetched"),
        ({"files": {**FILES, "model.safetensors.index.json": b"{}"}}, "has no weight_map"),
        ({"commit": "short"}, "names no commit: is it a Hub?"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals(online: Hub, home: Path, settings: dict, said: str) -> None:
    online.repositories["org/name"] = Repository(**{"files": FILES, **settings})
    assert said in (message := refusal() if "weight_map" not in said else refusal_of_a_file()), message
    nothing_half_made(home)


def refusal_of_a_file() -> str:
    with pytest.raises(FileError) as caught:
        fetched()
    return str(caught.value)


def test_a_repository_that_is_not_there(online: Hub) -> None:
    assert "has no such repository" in refusal() and "./org/name would be a directory" in refusal()


def test_a_disk_that_is_too_small_is_told_before_a_weight_comes(
    online: Hub, repository: Repository, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    message = refusal()
    assert "bytes are to be fetched, 1,000 are free" in message and "HF_HUB_CACHE" in message
    assert not [name for name in online.served if name.endswith(".safetensors")]


def test_a_disk_that_is_full_in_the_midst(online: Hub, repository: Repository, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ninfer_jax.models.transfer.os.fsync", full)
    assert "is full: make room there, or set HF_HUB_CACHE" in refusal()
    nothing_half_made(home)


def test_a_cache_that_everybody_may_write_to(online: Hub, repository: Repository) -> None:
    snapshot, _ = fetched()
    hub.repository("org/name").chmod(0o777)
    with pytest.raises(FileError, match="can be written by everybody: nothing in it is used; `chmod o-w"):
        fetched()
    hub.repository("org/name").chmod(0o755)
    assert fetched()[0] == snapshot


def test_records_that_are_none_are_passed_over(online: Hub, repository: Repository) -> None:
    snapshot, _ = fetched()
    (file,) = (kept.root() / "hub").iterdir()
    good = json.loads(file.read_text())
    changes: Iterable[dict] = ({"commit": "../.."}, {"files": {"../x": 1}}, {"files": []}, {"weights": "other"}, {"commit": 3})
    for change in changes:
        file.write_text(json.dumps(good | change))
        assert hub.recorded(NAME) is None
    file.write_text(json.dumps(good))
    assert hub.recorded(NAME) == snapshot
    os.truncate((snapshot.folder / "model-1.safetensors").resolve(), 10)
    assert not snapshot.whole
    assert contents(fetched()[0]) == FILES
