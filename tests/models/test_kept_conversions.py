"""Conversions are made once, whole or not at all, by one process at a time; nothing that somebody else may have written is used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import micro
import pytest
from hub_server import Hub, repository_of
from typer.testing import CliRunner

from ninfer_jax.checkpoints import Artifact
from ninfer_jax.cli.main import app
from ninfer_jax.engine import convert_apart, prepared
from ninfer_jax.engine.prepared import AS_IT_IS
from ninfer_jax.files import FileError
from ninfer_jax.models import hub, kept

ROOT = Path(__file__).resolve().parents[2]
WANTED = kept.Wanted("org/name", {"commit": "a" * 40}, "q4", {"tokenizer": "auto"})


def artifact_in(folder: Path, lock: int = 0) -> None:
    (folder / kept.MANIFEST).write_text("{}")


def always() -> bool:
    return True


def never(*_: object) -> None:
    pytest.fail("converted again")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return micro.write(tmp_path_factory.mktemp("source") / "micro", micro.draw())


def ready(model: str | Path, recipe: str | None = None, said: list[str] | None = None) -> Path:
    return prepared.prepared(model, recipe, say=(said if said is not None else []).append, tell=lambda *_: None)


@pytest.mark.long
def test_a_card_takes_a_checkpoint_converted_once(
    checkpoint: Path, home: Path, online: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    online.repositories["org/micro"] = repository_of(checkpoint)
    monkeypatch.setattr(prepared, "on_a_card", lambda: False)
    assert ready(checkpoint) == checkpoint
    assert ready("tiny").name == "tiny"
    monkeypatch.setattr(prepared, "on_a_card", lambda: True)
    assert ready("tiny").name == "tiny" and ready(checkpoint, AS_IT_IS) == checkpoint
    said: list[str] = []
    made = ready("org/micro", said=said)
    assert made.parent == home / ".cache/ninfer_jax/models/org--micro" and Artifact.open(made).manifest["recipe"]["name"] == "q4"
    assert "commit aaaaaaaa" in said[0] and said[1] == f"org/micro is converted once, recipe q4, into {made}"
    assert not [p for p in made.parent.iterdir() if p.name.endswith(".partial")]
    # From now on neither the network nor the source is needed, and an artifact is taken as it is.
    monkeypatch.setattr(prepared, "convert_apart", never)
    monkeypatch.setattr(hub, "fetch", never)
    snapshot = hub.recorded(prepared.checked("org/micro"))  # type: ignore[arg-type]
    assert snapshot is not None
    (snapshot.folder / "config.json").unlink()
    assert ready("org/micro") == made == ready(made)
    with pytest.raises(ValueError, match=r"recipe w8: .* is an artifact, its weights have formats of their own"):
        ready(made, "w8")
    with pytest.raises(ValueError, match="recipe 'q3' is unknown"):
        ready("org/micro", "q3")


def test_what_decides_the_result_is_in_the_key(checkpoint: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(recipe: str = "q4", tokenizer: str | None = "auto") -> str:
        found = prepared.checked(checkpoint)
        return prepared.job_of(checkpoint, found, recipe, tokenizer).key  # type: ignore[arg-type]

    first = key()
    assert key() == first and len({first, key("w8"), key(tokenizer=None)}) == 3
    file = checkpoint / "model.safetensors"
    before = file.stat()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert key() != first
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    (checkpoint / "quantize_config.json").write_text("{}")
    assert key() != first
    (checkpoint / "quantize_config.json").unlink()
    assert key() == first
    monkeypatch.setattr(kept, "code_digest", lambda: "other code")
    assert key() != first


def test_a_source_that_changes_meanwhile_makes_nothing(home: Path) -> None:
    with pytest.raises(FileError, match="org/name was changed while it was converted: nothing is kept"):
        kept.make(WANTED, artifact_in, lambda: False, print)
    assert kept.finished(WANTED) is None and not kept.listed()


DIES = """
import os, signal, sys
from ninfer_jax.models import kept
wanted = kept.Wanted("org/name", {"commit": "a" * 40}, "q4", {"tokenizer": "auto"})
def run(folder, lock):
    (folder / "begun").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
kept.make(wanted, run, lambda: True, print)
"""
HOLDS = """
import sys
from ninfer_jax.models import kept
wanted = kept.Wanted("org/name", {"commit": "a" * 40}, "q4", {"tokenizer": "auto"})
def run(folder, lock):
    print("begun", flush=True)
    sys.stdin.readline()
    (folder / "manifest.json").write_text("{}")
kept.make(wanted, run, lambda: True, print)
"""


def process(code: str) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)


def test_what_a_killed_process_left_is_gone_on_with_and_never_used(home: Path) -> None:
    with process(DIES) as dead:
        assert dead.wait() == -signal.SIGKILL
    assert kept.finished(WANTED) is None
    (left,) = kept.listed()
    assert left.state == "unfinished" and left.bytes == 4
    said: list[str] = []

    def goes_on(folder: Path, lock: int) -> None:
        assert (folder / "begun").read_text() == "half"
        artifact_in(folder)

    made = kept.make(WANTED, goes_on, always, said.append)
    assert said == [f"org/name as q4: process {dead.pid} ended in the midst of it; going on from there"]
    assert kept.make(WANTED, never, always, said.append) == made == kept.finished(WANTED)
    assert len(said) == 1 and kept.listed()[0].state == "whole"


def test_of_two_processes_one_converts_and_the_other_waits(home: Path) -> None:
    said: list[str] = []
    made: list[Path] = []
    with process(HOLDS) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "begun\n"
        (under_way,) = kept.listed()
        with pytest.raises(FileError, match=f"is being made by process {other.pid}: stop that first"):
            kept.remove(under_way)
        heard = threading.Event()
        waiting = threading.Thread(
            target=lambda: made.append(kept.make(WANTED, never, always, lambda line: (said.append(line), heard.set())))
        )
        waiting.start()
        assert heard.wait(60) and said == [f"org/name as q4: process {other.pid} is at it; waiting"] and not made
        other.stdin.write("go on\n")
        other.stdin.flush()
        waiting.join(60)
    assert made == [WANTED.place] and len(said) == 1


def test_what_others_may_have_written_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = kept.make(WANTED, artifact_in, always, print)
    for place in (made, made.parent, kept.root(), kept.root().parent):
        assert place.stat().st_mode & 0o777 == 0o700
        place.chmod(0o770)
        with pytest.raises(FileError, match=rf"{place} can be written by others: nothing in it is used; `chmod go-w {place}`"):
            kept.finished(WANTED)
        place.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(FileError, match="belongs to somebody else: nothing in it is used"):
            kept.finished(WANTED)
    assert kept.finished(WANTED) == made
    (home / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "a file"))
    with pytest.raises(FileError, match="models are kept there, or below XDG_CACHE_HOME"):
        kept.make(WANTED, artifact_in, always, print)


def test_the_command_lists_and_removes(home: Path, online: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["models", *arguments], env={"COLUMNS": "200"})
        assert done.exit_code == code, done.output
        return done.stderr if code else done.stdout

    assert run("list").startswith("nothing is kept")
    assert "nothing is kept of org/name: `ninfer-jax models list`" in run("remove", "org/name", code=1)
    made = kept.make(WANTED, artifact_in, always, print)
    other = kept.Wanted("org/other", {}, "w8", {})
    other_place = kept.make(other, artifact_in, always, print)
    online.repositories["org/name"] = repository_of(checkpoint)
    assert str(hub.repository("org/name")) in run("fetch", "org/name")
    assert "tiny is no Hub id" in run("fetch", "tiny", code=1)
    about = json.loads(run("list", "--json"))
    assert [(c["model"], c["recipe"], c["state"], c["bytes"], c["path"]) for c in about["converted"]] == [
        ("org/name", "q4", "whole", 2, str(made)),
        ("org/other", "w8", "whole", 2, str(other_place)),
    ]
    (there,) = about["fetched"]
    assert there["model"] == "org/name" and there["whole"] and there["bytes"] == sum(p.stat().st_size for p in checkpoint.iterdir())
    assert about["hub_cache"] == str(hub.cache()) and about["converted_in"] == str(kept.root())
    table = run("list")
    assert str(made) in table and "as fetched" in table and "2 B" in table
    monkeypatch.setattr(kept, "code_digest", lambda: "newer")
    assert "of an earlier version" in run("list")
    said = run("remove", "org/name")
    assert "removed org--name/q4-" in said and "`hf cache rm model/org/name`" in said
    assert [k.model for k in kept.listed()] == ["org/other"] and not hub.records() and not made.parent.exists()
    assert hub.repository("org/name").is_dir()
    run("remove", f"org--other/{other_place.name}")
    assert run("list").startswith("nothing is kept")


def test_a_conversion_apart_tells_what_is_refused_and_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt() -> None:
        with (tmp_path / "lock").open("w") as lock:
            options = {"recipe": "q4", "tokenizer": "auto"}
            convert_apart.convert_apart(tmp_path / "none", tmp_path / "made", options, lambda *_: None, lock.fileno())

    with pytest.raises(ValueError, match="none: No such file or directory"):
        attempt()
    monkeypatch.setattr(convert_apart, "START", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ValueError, match="the conversion was killed, as the system does when memory runs out"):
        attempt()
    monkeypatch.setattr(convert_apart, "START", "import sys; sys.exit('some reason')")
    with pytest.raises(RuntimeError, match="ended with status 1: some reason"):
        attempt()
