"""A conversion stopped anywhere and started again ends with the same digests as one that was left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import formats
import numpy as np
import pytest

from ninfer_jax.checkpoints import artifact as artifacts
from ninfer_jax.checkpoints import convert as converting
from ninfer_jax.engine.convert import convert


class Killed(BaseException):
    """Like a signal: no handler for errors sees it."""


@pytest.fixture(scope="module")
def source(tmp_path_factory, tensors):
    return formats.plain(tmp_path_factory.mktemp("plain") / "source", tensors)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, source, recipe):
    return convert(source, tmp_path_factory.mktemp("whole") / "made", recipe)


def nth(n, function, before=None):
    """`function`, but its n-th call kills instead (after `before`, called with the same arguments)."""
    calls = 0

    def call(*arguments, **named):
        nonlocal calls
        calls += 1
        if calls == n:
            if before:
                before(*arguments, **named)
            raise Killed
        return function(*arguments, **named)

    return call


def half_a_group(orbax, folder, args):
    """What Orbax leaves when it is killed amid a save: a directory under a temporary name."""
    partial = folder.with_name(f"{folder.name}.orbax-checkpoint-tmp")
    partial.mkdir()
    (partial / "array").write_bytes(b"half")


def test_killed_at_six_points(tmp_path, monkeypatch, source, whole, recipe):
    import orbax.checkpoint as ocp

    made = tmp_path / "made"
    points = [
        ("before the first group", converting, "quantise_tensors", nth(1, converting.quantise_tensors), []),
        ("amid a save", ocp.Checkpointer, "save", nth(1, ocp.Checkpointer.save, half_a_group), []),
        # The third write is the one after the second group: config and tokenizer files go another way.
        ("between a save and its note", converting, "write_json", nth(2, converting.write_json), ["embedding"]),
        ("amid a later group", converting, "quantise_tensors", nth(3, converting.quantise_tensors), ["embedding"]),
        (
            "while verifying",
            artifacts,
            "read_group",
            nth(3, artifacts.read_group),
            ["embedding", "layers.0", "layers.1", "head", "mtp"],
        ),
        (
            "before the manifest",
            converting,
            "write_json",
            nth(1, converting.write_json),
            ["embedding", "layers.0", "layers.1", "head", "mtp"],
        ),
    ]
    for where, owner, name, replacement, done in points:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, replacement)
            with pytest.raises(Killed):
                convert(source, made, recipe)
        assert not artifacts.is_artifact(made), where
        noted = json.loads((made / "progress.json").read_text())["done"]
        assert set(done) <= set(noted), where
    again = []
    artifact = convert(source, made, recipe, progress=lambda stage, done, total: again.append((stage, done, total)))
    written = [(done, total) for stage, done, total in again if stage == "weights"]
    assert written == [(written[0][1], written[0][1])]  # nothing was left to quantise
    assert artifact.manifest == whole.manifest
    assert not (made / "progress.json").exists()
    for file in whole.path.rglob("0*"):
        assert (made / file.relative_to(whole.path)).read_bytes() == file.read_bytes()


def test_sigkill(tmp_path, source, whole, recipe):
    made = tmp_path / "made"
    script = f"""
import os, signal
from ninfer_jax.config import Recipe
from ninfer_jax.engine.convert import convert
from ninfer_jax.checkpoints import convert as converting
save = converting._Conversion._save
def counted(self, group, *rest):
    if group == "layers.1":
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, group, *rest)
converting._Conversion._save = counted
convert({str(source)!r}, {str(made)!r}, Recipe.from_json({recipe.as_json()!r}))
"""
    killed = subprocess.run([sys.executable, "-c", script], env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert set(json.loads((made / "progress.json").read_text())["done"]) == {"embedding", "layers.0"}
    assert convert(source, made, recipe).manifest == whole.manifest


def test_a_group_that_went_bad_is_made_again(tmp_path, monkeypatch, source, whole, recipe, refused):
    made = tmp_path / "made"
    with monkeypatch.context() as patched:
        patched.setattr(artifacts, "read_group", nth(1, artifacts.read_group))
        with pytest.raises(Killed):
            convert(source, made, recipe)
    file = made / "parameters/layers.1/layers.1.mlp.down_proj.scales/0.0"
    file.write_bytes(bytes(file.stat().st_size))
    refused(lambda: convert(source, made, recipe), "layers.1.mlp.down_proj.scales is damaged")
    assert convert(source, made, recipe).manifest == whole.manifest


def test_another_source_or_recipe_does_not_go_on(tmp_path, monkeypatch, tensors, source, recipe, refused):
    made = tmp_path / "made"
    with monkeypatch.context() as patched:
        patched.setattr(converting, "quantise_tensors", nth(2, converting.quantise_tensors))
        with pytest.raises(Killed):
            convert(source, made, recipe)
    refused(lambda: convert(source, made, "w8"), made, "another source or recipe")
    other = formats.plain(tmp_path / "other", tensors | {"norm.weight": np.ones(formats.HIDDEN, np.float32)})
    refused(lambda: convert(other, made, recipe), made, "another source or recipe")
