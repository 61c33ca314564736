"""The tensors of the MTP layer: which ones it has, and files in which they lie although no index lists them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from ninfer_jax.checkpoints.checkpoint import canonical_name, some_names
from ninfer_jax.checkpoints.safetensors_file import CheckpointError, read_header

PREFIX = "mtp."
_LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
# Of one layer, in the order in which they compute: the only number of layers that checkpoints of this family have.
MTP_TENSORS = (
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    *(f"mtp.layers.0.{name}.weight" for name in _LAYER),
    "mtp.norm.weight",
)


def unlike_one_layer(names: Collection[str]) -> str:
    """The fault of the `mtp.*` tensors among canonical `names`, as the end of a sentence; "" where they make one layer.

    The matrices of quantised checkpoints have other fields than `weight`; these count as the tensor.
    """
    modules = {_module(name) for name in names if name.startswith(PREFIX)}
    wanted = {_module(name): name for name in MTP_TENSORS}
    lacking = [name for module, name in wanted.items() if module not in modules]
    if lacking:
        return f"lack {len(lacking)} of {len(MTP_TENSORS)}: {some_names(lacking)}"
    more = sorted(modules - wanted.keys())
    return f"are more than those of one layer: {some_names(more)}" if more else ""


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def unlisted_mtp(path: Path, files: Iterable[Path]) -> Path | None:
    """A safetensors file with `mtp.*` tensors in the directory of the checkpoint `path`, none of its `files`; None without.

    An index lists what a checkpoint consists of, but people, and tools, lay an MTP head beside it.
    """
    folder, own = path if path.is_dir() else path.parent, {file.resolve() for file in files}
    for file in sorted(folder.glob("*.safetensors")):
        if not file.is_file() or file.resolve() in own:
            continue
        try:
            names = read_header(file)
        except CheckpointError:  # whatever else it is, it is no part of this checkpoint
            continue
        if any(canonical_name(name).startswith(PREFIX) for name in names):
            return file
    return None
