"""The weights of a model directory, whether it is a checkpoint or an artifact, as an engine takes them.

An artifact's arrays are used as they are: a GPU gets copies, a CPU maps the files. Only XLA's operations, where they are asked
for on a CPU, have nothing to read codes with: for them the arrays are expanded once, to the numbers they stand for, and the
plain model runs over those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ninfer_jax.checkpoints import Artifact, ArtifactError, Checkpoint, ParameterSpec, is_artifact, iter_parameters, load_parameters
from ninfer_jax.checkpoints.checkpoint import INDEX_NAME
from ninfer_jax.checkpoints.mtp import unlisted_mtp
from ninfer_jax.checkpoints.sources.mlx import refuse_mlx
from ninfer_jax.config import ModelConfig, Recipe
from ninfer_jax.engine import huge_pages
from ninfer_jax.engine.expand import expand
from ninfer_jax.model import TextModel, fill, fill_arrays, join_and_put, parameter_specs, parameters_of, split_model

Tell = Callable[[int, int], None]


class CheckpointWeights:
    """Weights of a Hugging Face checkpoint directory."""

    recipe: Recipe | None = None

    def __init__(self, path: Path):
        self._checkpoint = Checkpoint.open(path)
        refuse_mlx(self._checkpoint.tensors, {})
        self.has_mtp = self._checkpoint.has_mtp
        self.files = {info.file for info in self._checkpoint.tensors.values()}

    def digest(self) -> str:
        """SHA-256 of the files' contents, read whole."""
        sha = hashlib.sha256()
        for file in sorted(self.files):
            with file.open("rb") as opened:
                sha.update(hashlib.file_digest(opened, "sha256").digest())
        return sha.hexdigest()

    def check(self, model: TextModel) -> None:
        """ValueError for tensors that do not fit, by the files' headers, before anything expensive."""
        iter_parameters(self._checkpoint, parameter_specs(model), ignore_prefixes=() if model.has_mtp else ("mtp.",))

    def parameters(self, model: TextModel, tell: Tell) -> nnx.State:
        """The filled parameters of `model`, whose weights are in its dtype."""
        arrays = load_parameters(
            self._checkpoint,
            parameter_specs(model),
            ignore_prefixes=() if model.has_mtp else ("mtp.",),
            progress=lambda done, total, name: tell(done, total),
        )
        return fill(split_model(model)[1], arrays, _put())


class ArtifactWeights:
    """Weights of an artifact directory; verify: compare the digests of its arrays as they are read."""

    def __init__(self, path: Path, verify: bool = True):
        self.artifact, self._verify = Artifact.open(path), verify
        self.has_mtp = self.artifact.has_mtp

    def digest(self) -> str:
        """SHA-256 of the arrays' digests, as the manifest has them."""
        names = (f"{a.group}/{a.name} {a.sha256}\n" for arrays in self.artifact.groups.values() for a in arrays)
        return hashlib.sha256("".join(sorted(names)).encode()).hexdigest()

    @property
    def recipe(self) -> Recipe | None:
        """The formats that the weights are stored in."""
        return stored_recipe(self.artifact)

    def check(self, model: TextModel) -> None:
        """ValueError for arrays that do not fit, by the manifest, before anything expensive."""
        self._specs(model.config, model.has_mtp)

    def parameters(self, model: TextModel, tell: Tell) -> nnx.State:
        """The filled parameters of `model`, quantised or plain as it is."""
        skip = () if model.has_mtp else ("mtp",)

        def progress(done: int, total: int, group: str) -> None:
            tell(done, total)

        _, described = split_model(model)
        described_as = parameters_of(model)
        if any(spec.stored for spec in described_as):
            if jax.default_backend() != "cpu":
                return fill_arrays(described, self.artifact.load(jax.device_put, verify=self._verify, skip=skip, progress=progress))
            loaded: dict[str, jax.Array] = {}
            for group in self.artifact.read_groups(mapped=True, verify=self._verify, skip=skip, progress=progress):
                loaded |= {name: jax.device_put(array) for name, array in group.items()}  # aligned memory is not copied
            return fill_arrays(described, _in_the_models_dtypes(loaded, described_as))
        specs = self._specs(model.config, model.has_mtp)
        dtypes = {t.name: jnp.dtype(t.dtype) for t in parameter_specs(model)}
        tensors: dict[str, np.ndarray] = {}
        for arrays in self.artifact.read_groups(verify=self._verify, skip=skip, progress=progress):
            while arrays:
                spec = specs[next(iter(arrays))]
                # What only the model of stored formats has (a draft head) is expanded for nothing and dropped.
                own = [dtypes[t.name] for t in spec.tensors if t.name in dtypes]
                tensors |= {n: a for n, a in expand(spec, arrays, own[0] if own else jnp.float32).items() if n in dtypes}
        return fill(described, tensors, _put())

    def _specs(self, config: ModelConfig, mtp: bool) -> dict[str, ParameterSpec]:
        """The quantised model's parameters, by the name of each of their arrays."""
        quantised = parameters_of(TextModel(config, jnp.bfloat16, mtp=mtp, recipe=stored_recipe(self.artifact)))
        found = {f"{s.name}.{field}" if s.name else field: s for s in quantised for field in s.arrays}
        held = {a.name: a for group, arrays in self.artifact.groups.items() if mtp or group != "mtp" for a in arrays}
        for name in found.keys() ^ held.keys():
            where = "the model has no such array" if name in held else "the artifact lacks it"
            raise ArtifactError(f"{self.artifact.path}: {name}: {where}; config.json and manifest.json do not go together")
        for name, spec in found.items():
            array = spec.arrays[name.rpartition(".")[2]]
            if (held[name].shape, held[name].dtype) != (tuple(array.shape), str(np.dtype(array.dtype))):
                raise ArtifactError(
                    f"{self.artifact.path}: {name} is {held[name].dtype} {list(held[name].shape)}, "
                    f"the model has {array.dtype} {list(array.shape)}"
                )
        return found


def _in_the_models_dtypes(arrays: dict[str, jax.Array], specs: Sequence[ParameterSpec]) -> dict[str, jax.Array]:
    """`arrays`, those that are not quantised in the dtype of the model's activations where it has them so."""
    for spec in specs:
        for field, wanted in spec.arrays.items() if spec.stored is None else ():
            name = f"{spec.name}.{field}" if spec.name else field
            if name in arrays and arrays[name].dtype != wanted.dtype:
                arrays[name] = arrays[name].astype(wanted.dtype)
    return arrays


def _put() -> Callable[[Sequence[np.ndarray]], jax.Array]:
    return huge_pages.on_cpu if jax.default_backend() == "cpu" else join_and_put


def open_weights(path: Path, verify: bool = True) -> CheckpointWeights | ArtifactWeights:
    """verify: as for `ArtifactWeights`; a checkpoint has no digests. ValueError, one line, for a directory that is neither."""
    return ArtifactWeights(path, verify) if is_artifact(path) else CheckpointWeights(path)


def why_no_drafts(path: Path, model: ModelConfig, weights: CheckpointWeights | ArtifactWeights) -> str:
    """Why a model cannot draft and what to do, as a sentence; "" where it can. Its MTP head may be missing, not counted in
    config.json, or in a file that is no part of the checkpoint."""
    if weights.has_mtp and model.mtp_layers:
        return ""
    if weights.has_mtp:
        return (
            f"mtp_num_hidden_layers is 0 in {path / 'config.json'}, though its mtp.* tensors are there: set it to 1, "
            "or use draft 0 or drafter 'lookup'"
        )
    file = None if isinstance(weights, ArtifactWeights) else unlisted_mtp(path, weights.files)
    if file is not None:
        return (
            f"the MTP head in {file} is no part of the checkpoint: convert with --mtp {file}, list its tensors in {INDEX_NAME}, "
            "or use draft 0 or drafter 'lookup'"
        )
    return f"{path} has no MTP head (mtp.* tensors) to draft with; use draft 0 or drafter 'lookup'"


def stored_recipe(artifact: Artifact) -> Recipe:
    """The recipe by which an artifact was made, with the formats of single parameters that kept their source's codes."""
    try:
        recipe = Recipe.from_json(artifact.manifest["recipe"])
        own = {n: (p.role, p.stored.group) for n, p in artifact.parameters.items() if p.stored and p.stored.kind == "matrix"}
        return recipe.with_groups(own)
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{artifact.path}: the manifest's recipe is damaged ({type(error).__name__} {error})") from None
