"""`benchmarks/check_shapes.py` with small widths: the way is the same, and what it compares can differ."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import check_shapes  # noqa: E402
from benchmarks.shapes import artifact as random_artifact  # noqa: E402
from benchmarks.shapes import checkpoint, engine_side, oracle, stored  # noqa: E402
from ninfer_jax.config import ModelConfig  # noqa: E402
from ninfer_jax.engine.convert import convert  # noqa: E402
from ninfer_jax.engine.weights_in import ArtifactWeights  # noqa: E402
from ninfer_jax.model import TextModel  # noqa: E402


@pytest.fixture(scope="module")
def way(tmp_path_factory) -> SimpleNamespace:
    """Checkpoint in shards, artifact, and both sides' numbers."""
    folder = tmp_path_factory.mktemp("shapes")
    config = checkpoint.text_config(4, miniature=True)
    checkpoint.write(folder / "checkpoint", config, seed=1, shard_bytes=3_000_000)
    convert(folder / "checkpoint", folder / "artifact")
    ids, ours, theirs = folder / "ids.npy", folder / "ours.npz", folder / "theirs.npz"
    np.save(ids, np.random.default_rng(2).integers(0, 1024, 70))
    engine_side.main(str(folder / "artifact"), str(ids), str(ours), "float32", "4", "abc")
    oracle.main(str(folder / "artifact"), str(ids), str(ours), str(theirs))
    return SimpleNamespace(folder=folder, config=config, ids=ids, ours=dict(np.load(ours)), theirs=dict(np.load(theirs)))


def test_the_checkpoint_is_laid_out_as_it_is_published(way):
    source = way.folder / "checkpoint"
    index = json.loads((source / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in source.glob("*.safetensors"))
    assert len(files) >= 4 and sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == checkpoint.nbytes(way.config)
    assert not [p for p in source.glob("*.safetensors") if p.stat().st_size > 3_100_000]


def test_the_27b_by_its_published_size():
    """55,562,855,904 bytes in the index of the release, of which 921,460,192 are the vision tower's."""
    assert checkpoint.nbytes(checkpoint.text_config(64)) == 55_562_855_904 - 921_460_192


def test_engine_and_transformers_agree(way):
    assert way.ours["logits"].shape == way.theirs["logits"].shape == (70, 1088)
    assert check_shapes.compare(way.ours, way.theirs, "float32") == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ours: ours["logits"].__imul__(1 + 3e-5), "logits differ"),
        (lambda ours: ours["logits"][:, 77].__imul__(1.001), "logits of token 77"),
        (lambda ours: ours["logits"].__setitem__((3, 5), np.nan), "logits differ"),
        (lambda ours: ours.update(first=(ours["first"] + 1) % 1088), "first token is"),
        (lambda ours: ours["drafts"].__setitem__(2, (ours["drafts"][2] + 1) % 1088), "draft 3 is"),
    ],
)
def test_a_difference_is_said(way, change, said):
    ours = {name: array.copy() for name, array in way.ours.items()}
    change(ours)
    broken = check_shapes.compare(ours, way.theirs, "float32")
    assert any(line.startswith(said) for line in broken), broken


def test_the_formula_is_the_artifacts_and_no_other(way, monkeypatch, tmp_path):
    """With two nibbles of every word in the other order the oracle computes something else."""
    right = stored.matrix_values

    def wrong(words, scales, unit, bits, group):
        swapped = ((words.view(np.uint16) & 0xF0F0) >> 4 | (words.view(np.uint16) & 0x0F0F) << 4).view(np.int16)
        return right(np.ascontiguousarray(swapped), scales, unit, bits, group)

    monkeypatch.setattr(stored, "matrix_values", wrong)
    out = tmp_path / "theirs.npz"
    oracle.main(str(way.folder / "artifact"), str(way.ids), str(way.folder / "ours.npz"), str(out))
    assert len(check_shapes.compare(way.ours, dict(np.load(out)), "float32")) > 2


def test_a_random_artifact_is_one_and_its_projections_keep_the_size_of_what_they_read(tmp_path):
    config = checkpoint.text_config(4, miniature=True)
    made = random_artifact.write(tmp_path / "made", config, "q4", seed=1)
    weights = ArtifactWeights(made.path)
    weights.check(TextModel(ModelConfig.from_hf(made.path), jnp.float32, mtp=True, recipe=weights.recipe))
    numbers = stored.Stored(made.path)
    for name, n, k, size in (("layers.0.mlp.gate_up_proj", 768, 256, 1.0), ("layers.3.self_attn.o_proj", 256, 1536, 0.5)):
        values = numbers.matrix(name, n, k).numpy()
        assert abs(np.sqrt((values**2).sum(axis=1).mean()) / size - 1) < 0.2, name
    rows = numbers.rows("embed_tokens", np.arange(1088)).numpy()
    assert abs(rows.std() - 1) < 0.2


def test_refusals(tmp_path, monkeypatch, capsys):
    (tmp_path / "thesis.txt").write_text("all of it")
    for arguments, said in ((["--layers", "6"], "--layers is 6"), (["--dir", str(tmp_path)], "is not an empty directory")):
        assert check_shapes.main(arguments) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    assert check_shapes.main(["--dir", str(tmp_path / "new")]) == 2
    assert "1,000,000,000 are free" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_step_that_fails_ends_it_and_leaves_nothing(tmp_path, capsys):
    assert check_shapes.main(["--miniature", "--dir", str(tmp_path / "new"), "--recipe", "q5"]) == 1
    said = capsys.readouterr()
    assert "convert q5: exit 1: error: recipe 'q5' is unknown" in said.err
    assert f"{checkpoint.nbytes(checkpoint.text_config(4, miniature=True)) / 1e6:.1f} MB in BF16" in said.out
    assert not (tmp_path / "new").exists()
