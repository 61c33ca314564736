"""An MTP layer is used where it is whole, whatever config.json says of it, and named where it cannot be used; nowhere is it
dropped without a word."""

from __future__ import annotations

import json

import formats
import numpy as np
import pytest
from safetensors.torch import save_file

from ninfer_jax import Engine, EngineConfig
from ninfer_jax.checkpoints.mtp import MTP_TENSORS
from ninfer_jax.checkpoints.sources import open_source
from ninfer_jax.config import ModelConfig
from ninfer_jax.engine.convert import convert, plan, with_mtp_count
from ninfer_jax.engine.draft_head import pick_ids, with_draft_head
from ninfer_jax.engine.weights_in import open_weights, why_no_drafts
from ninfer_jax.text import Tokenizer

ENGINE = EngineConfig(context=256, draft=2)
UNCOUNTED = {k: v for k, v in formats.CONFIG.items() if k != "mtp_num_hidden_layers"}
COMPOSITE = {"model_type": "qwen3_5", "text_config": UNCOUNTED}


def without(tensors, *starts):
    return {n: t for n, t in tensors.items() if not n.startswith(starts)}


def checkpoint(folder, tensors, config=UNCOUNTED):
    return formats.write(folder, formats.as_bfloat16(tensors), None, config)


def mtp_file(path, tensors, **more):
    path.parent.mkdir(exist_ok=True)
    held = {n: t for n, t in tensors.items() if n.startswith("mtp.")} | more
    save_file({n: t.contiguous() for n, t in formats.as_bfloat16(held).items()}, path)
    return path


def test_the_names_are_those_of_the_family():
    assert set(MTP_TENSORS) == {n for n in formats.shapes() if n.startswith("mtp.")} and len(MTP_TENSORS) == 15


@pytest.mark.parametrize(
    "config",
    [UNCOUNTED, UNCOUNTED | {"mtp_num_hidden_layers": None}, COMPOSITE, COMPOSITE | {"mtp_num_hidden_layers": 1}],
    ids=["missing", "null", "missing inside", "only outside"],
)
def test_a_whole_layer_without_a_count_is_used(tmp_path, tensors, recipe, config):
    folder = checkpoint(tmp_path / "source", tensors, config)
    assert ModelConfig.from_hf(folder) == ModelConfig.from_hf(folder / "config.json") == ModelConfig.from_hf(formats.CONFIG)
    assert why_no_drafts(folder, ModelConfig.from_hf(folder), open_weights(folder)) == ""
    source = with_mtp_count(open_source(folder))
    assert source.config.get("text_config", source.config)["mtp_num_hidden_layers"] == 1
    planned = plan(source, recipe)
    assert {"mtp.fc", "mtp.layers.0.self_attn.qkv_proj"} <= planned.made.keys() and not planned.notes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: without(t, "mtp.norm.", "mtp.fc."), ("lack 2 of 15", "mtp.fc.weight, mtp.norm.weight")),
        (
            lambda t: t | {"mtp.layers.1.mlp.up_proj.weight": np.zeros((2, 2), np.float32)},
            ("more than those of one layer", "mtp.layers.1.mlp.up_proj"),
        ),
    ],
)
def test_half_a_layer_without_a_count_is_refused(tmp_path, tensors, recipe, refused, change, said):
    folder = checkpoint(tmp_path / "source", change(tensors))
    for use in (
        lambda: Engine.load(folder, ENGINE),
        lambda: with_mtp_count(open_source(folder)),
        lambda: convert(folder, "x", recipe),
    ):
        refused(use, "mtp_num_hidden_layers is missing", *said)


def test_a_layer_that_is_counted_as_none(tmp_path, tensors, recipe, refused):
    folder = checkpoint(tmp_path / "source", tensors, formats.CONFIG | {"mtp_num_hidden_layers": 0})
    message = refused(
        lambda: Engine.load(folder, ENGINE), "draft is 2", "mtp_num_hidden_layers is 0", "tensors are there", "draft 0"
    )
    assert "no MTP head" not in message
    source = with_mtp_count(open_source(folder))
    planned = plan(source, recipe)
    assert "mtp.fc" not in planned.made
    assert planned.notes == ["mtp_num_hidden_layers is 0 in config.json: the source's mtp.* tensors are left out, no drafting"]
    ids = pick_ids(Tokenizer.from_dir(folder), "Romeo", 64)
    refused(lambda: with_draft_head(source, ids), "draft head", "mtp_num_hidden_layers is 0")


def test_a_model_that_has_none_is_told_so(tmp_path, tensors, recipe, refused):
    folder = checkpoint(tmp_path / "source", without(tensors, "mtp."))
    refused(lambda: Engine.load(folder, ENGINE), "draft is 2", "has no MTP head", "use draft 0")
    source = with_mtp_count(open_source(folder))
    assert source.config["mtp_num_hidden_layers"] == 0 and plan(source, recipe).notes == []
    ids = pick_ids(Tokenizer.from_dir(folder), "Romeo", 64)
    refused(lambda: with_draft_head(source, ids), "draft head", "no mtp.* tensors")
    tied = open_source(checkpoint(tmp_path / "tied", without(tensors, "lm_head."), UNCOUNTED | {"tie_word_embeddings": True}))
    refused(lambda: with_draft_head(tied, ids), "draft head", "tied to the embedding")


# --- in a file that the checkpoint does not list -----------------------------------------------------------------------------


def indexed(folder, tensors):
    """One shard and an index, as most checkpoints have it."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = {n if n.startswith("lm_head.") else f"model.language_model.{n}" for n in tensors}
    index = {"weight_map": dict.fromkeys(sorted(names), "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("count", [0, 1, None])
def test_a_file_beside_is_offered_and_taken_when_it_is_named(tmp_path, tensors, recipe, refused, with_index, count):
    trunk = without(tensors, "mtp.")
    folder = checkpoint(tmp_path / "source", trunk, UNCOUNTED | ({} if count is None else {"mtp_num_hidden_layers": count}))
    if with_index:
        indexed(folder, trunk)
    file = mtp_file(folder / "mtp.safetensors", tensors)
    (folder / "broken.safetensors").write_bytes(b"no header")
    message = refused(lambda: Engine.load(folder, ENGINE), "draft is 2", f"the MTP head in {file}", f"--mtp {file}", "use draft 0")
    assert "has no MTP head" not in message
    offered = f"mtp.safetensors holds an MTP layer that is no part of the checkpoint: to take it, convert with --mtp {file}"
    assert open_source(folder).notes == (offered,)
    ids = pick_ids(Tokenizer.from_dir(folder), "Romeo", 64)
    refused(lambda: with_draft_head(open_source(folder), ids), "no mtp.* tensors", f"--mtp {file}")

    source = with_mtp_count(open_source(folder, file), given=True)
    assert source.config["mtp_num_hidden_layers"] == 1 and file in source.files
    formats.assert_same(source, tensors)
    planned = plan(source, recipe)
    assert "mtp.fc" in planned.made and planned.notes == ["the MTP layer is that of mtp.safetensors"]


def test_an_artifact_with_an_mtp_layer_from_a_file(tmp_path, tensors, recipe):
    folder = checkpoint(tmp_path / "source", without(tensors, "mtp."))
    file = mtp_file(tmp_path / "elsewhere" / "model.safetensors", tensors)
    made = convert(folder, tmp_path / "made", recipe, mtp=file)
    assert made.has_mtp and ModelConfig.from_hf(made.path).mtp_layers == 1
    assert list(made.manifest["source"]["files"]) == ["model.safetensors", str(file)]
    assert made.manifest["notes"] == ["the MTP layer is that of model.safetensors"]
    assert why_no_drafts(made.path, ModelConfig.from_hf(made.path), open_weights(made.path)) == ""


def test_files_that_are_no_mtp_layer(tmp_path, tensors, recipe, refused):
    trunk = without(tensors, "mtp.")
    folder = checkpoint(tmp_path / "source", trunk)
    mixed = mtp_file(tmp_path / "mixed.safetensors", tensors, **{"norm.weight": tensors["norm.weight"]})
    half = mtp_file(tmp_path / "half.safetensors", without(tensors, "mtp.fc"))
    refused(lambda: open_source(folder, mixed), f"--mtp {mixed}", "holds norm.weight", "no others")
    refused(lambda: open_source(folder, tmp_path / "nothing"), "--mtp", "No such file")
    refused(lambda: convert(folder, tmp_path / "made", recipe, mtp=half), "lack 1 of 15", "mtp.fc.weight")
    whole = checkpoint(tmp_path / "whole", tensors)
    refused(lambda: open_source(whole, half), f"--mtp {half}", "an MTP layer of its own")


def test_a_gguf_file_takes_one_too(tmp_path, tensors):
    formats.write_gguf(tmp_path / "model.gguf", without(tensors, "mtp."), {}, blocks=2, nextn=None)
    file = mtp_file(tmp_path / "beside" / "mtp.safetensors", tensors)
    source = with_mtp_count(open_source(tmp_path / "model.gguf", file), given=True)
    assert ModelConfig.from_hf(source.config) == ModelConfig.from_hf(formats.CONFIG)
    np.testing.assert_array_equal(source.tensors["mtp.fc.weight"].read(0, 256), tensors["mtp.fc.weight"])
