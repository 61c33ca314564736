"""From a checkpoint in any known format to an artifact: what `ninfer-jax convert` does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from ninfer_jax.checkpoints import Artifact
from ninfer_jax.checkpoints.convert import Plan, Progress, check_tensors, parameter_key, repackable, write_artifact
from ninfer_jax.checkpoints.sources import Source, open_source
from ninfer_jax.config import ModelConfig, Recipe, config_notes
from ninfer_jax.config import recipe as recipe_called
from ninfer_jax.engine.draft_head import DRAFT_IDS, pick_ids, with_draft_head
from ninfer_jax.files import regular_file
from ninfer_jax.model import TextModel, parameters_of
from ninfer_jax.model_path import destination_path
from ninfer_jax.models import Say, printed, source_of
from ninfer_jax.text.source_text import tokenizer_in


def convert(
    source: str | Path,
    destination: str | Path,
    recipe: str | Recipe = "q4",
    *,
    draft_head: int = 0,
    draft_text: str = "",
    tokenizer: str | None = "auto",
    mtp: str | Path | None = None,
    progress: Progress | None = None,
    say: Say = printed,
) -> Artifact:
    """Quantise the checkpoint `source` (a directory, a file, a Hub id) by a recipe into the artifact directory `destination`; an
    interrupted conversion goes on where it was. draft_head: rows of the reduced head that drafts choose from on a GPU (0: none),
    picked by how often `draft_text` uses their tokens. tokenizer: "auto" for that of the source, None where it has none and token
    ids alone are to go in and out. mtp: a safetensors file with the MTP layer of a source that has none of its own. progress:
    called with (stage, bytes done, bytes in all). say: as for `Engine.load`.

    ValueError, one line: a source or a recipe that does not fit, and what `ninfer_jax.checkpoints.convert.write_artifact` refuses.
    """
    wanted = recipe_called(recipe) if isinstance(recipe, str) else recipe
    destination = destination_path(destination)
    source = source_of(source, say, progress or (lambda stage, done, total: None))
    mtp = None if mtp is None else regular_file(mtp, "mtp", "mtp: ")
    found, ids = with_mtp_count(open_source(source, mtp), given=mtp is not None), None
    if draft_head:
        ids = pick_ids(tokenizer_in(found), draft_text, draft_head)
        found, wanted = with_draft_head(found, ids), dataclasses.replace(wanted, draft_head=draft_head)
    planned = plan(found, wanted, tokenizer)
    if ids is not None:
        planned = dataclasses.replace(planned, constants={DRAFT_IDS: ids})
    return write_artifact(found, planned, destination, recipe=wanted.as_json(), progress=progress)


def with_mtp_count(source: Source, given: bool = False) -> Source:
    """`source` with the number of MTP layers in its config, which its tensors say where the config does not, or where the
    layer was `given` by itself. ValueError as `ModelConfig.from_hf`."""
    inside = "text_config" in source.config
    text = dict(source.config["text_config"] if inside else source.config)
    if text.get("mtp_num_hidden_layers") is not None and not given:
        return source
    outer = dict(source.config)
    if given:
        text["mtp_num_hidden_layers"] = None
        outer.pop("mtp_num_hidden_layers", None)
    config = {**outer, "text_config": text} if inside else text
    text["mtp_num_hidden_layers"] = ModelConfig.from_hf(config, source.tensors).mtp_layers
    return dataclasses.replace(source, config=config)


def plan(source: Source, recipe: Recipe, tokenizer: str | None = "auto") -> Plan:
    """The parameters that there are, and their formats: the recipe's, with the group of the source where its 4-bit codes can be
    kept. Checks the source's config, tokenizer and tensors on the way."""
    config = ModelConfig.from_hf(source.config, source.tensors)
    if tokenizer is not None:
        _check_tokenizer(source, config)
    mtp = config.mtp_layers > 0 and source.has_mtp
    specs = parameters_of(TextModel(config, jnp.bfloat16, mtp=mtp, recipe=recipe))
    check_tensors(source, specs, ignore=() if config.mtp_layers else ("mtp.",))
    groups, notes = repackable(specs, source)
    roles = {spec.name: spec.role for spec in specs if spec.stored is not None}
    own = recipe.with_groups({name: (roles[name], group) for name, group in groups.items()})
    specs = parameters_of(TextModel(config, jnp.bfloat16, mtp=mtp, recipe=own))
    made = {parameter_key(s): "kept" if s.stored is None else "repacked" if s.name in groups else "quantised" for s in specs}
    if config.mtp_layers and not mtp:
        notes.append("the source has no MTP tensors: no drafting with this artifact")
    elif source.has_mtp and not mtp:
        notes.append("mtp_num_hidden_layers is 0 in config.json: the source's mtp.* tensors are left out, no drafting")
    return Plan(specs, made, [*config_notes(source.config), *source.notes, *notes])


def _check_tokenizer(source: Source, config: ModelConfig) -> None:
    ids = tokenizer_in(source).vocab_size
    if ids > config.vocab_size:
        raise ValueError(f"{source.path}: tokenizer.json has {ids} ids, the model a vocab_size of {config.vocab_size}")
