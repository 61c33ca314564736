"""Bytes of everything that an engine keeps on its device, from the model's geometry alone.

The arrays themselves are described in `ninfer_jax.model`, `ninfer_jax.state` and `pallas_kernels`, which need JAX to be asked;
here the same shapes are arithmetic, and tests compare the two role by role.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from ninfer_jax.config import FULL, PAGE, ModelConfig, Recipe, WeightFormat
from pallas_kernels.kv_formats import check_format

_F32, _BF16, _INTEGER, _FLAG = 4, 2, 4, 1
ITEM = {"float32": _F32, "bfloat16": _BF16}  # bytes of a number of a dtype
_COLUMNS = 128  # a quantised matrix's columns are padded to a multiple of it (`pallas_kernels.matmul.quantised`)
_STOP_IDS = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """All that decides the sizes of a state and of weights, beside the model. drafter is "none" exactly where draft is 0. pool:
    tokens that all slots share. prefill_chunk: rows of a prefill call. dtype: of activations, and of weights without a format."""

    context: int
    slots: int
    draft: int
    drafter: str
    kv: str
    pool: int
    prefill_chunk: int
    dtype: str
    recipe: Recipe | None = None

    @property
    def mtp(self) -> bool:
        """Whether the MTP head drafts."""
        return "mtp" in self.drafter

    @property
    def lookup(self) -> bool:
        """Whether drafts are looked up in a sequence's own tokens."""
        return "lookup" in self.drafter

    @property
    def pages(self) -> int:
        """Pages of each pool, page 0 included, which is nobody's."""
        return -(-self.pool // PAGE) + 1


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A projection's weight, by its parameter's name, with its role in recipes."""

    name: str
    role: str
    inputs: int
    outputs: int

    def nbytes(self, format: WeightFormat | None, item: int) -> int:
        """Bytes in that format, padding included; for None, of numbers of `item` bytes."""
        if format is None:
            return self.inputs * self.outputs * item
        tiles = -(-self.inputs // (format.group * (16 // format.bits)))
        columns = -(-self.outputs // _COLUMNS) * _COLUMNS
        words, scale = tiles * format.group * columns * 2, 4 if format.bits == 4 else 2
        return words + tiles * columns * scale + columns * _F32


def weights(model: ModelConfig, shape: Shape) -> dict[str, int]:
    """Bytes of the weights by role, the largest first."""
    recipe, item = shape.recipe, ITEM[shape.dtype]
    found: collections.Counter[str] = collections.Counter()
    for matrix in matrices(model, shape.mtp, recipe.draft_head if recipe else 0):
        format = recipe and recipe.overrides.get(matrix.name, recipe.formats.get(matrix.role))
        found[matrix.role] += matrix.nbytes(format, item)
    if shape.mtp and recipe and recipe.draft_head:
        found["draft_ids"] += recipe.draft_head * _INTEGER
    found["embed"] += _embedding(model, recipe and recipe.formats.get("embed"), item)
    found["norm"] += _norms(model, shape)
    found["conv"] += len(model.gdn_layers) * model.conv_channels * model.conv_width * _F32
    found["gdn_gate"] += len(model.gdn_layers) * 2 * model.gdn_value_heads * _F32  # A_log and dt_bias
    return {role: count for role, count in found.most_common() if count}


def matrices(model: ModelConfig, mtp: bool, draft_head: int = 0) -> Iterator[Matrix]:
    """Every projection: of the layers, the output head, and the MTP head where it drafts."""
    hidden, inner = model.hidden_size, model.intermediate_size
    query, keys = model.query_heads * model.head_dim, model.kv_heads * model.head_dim

    def layer(at: str, kind: str, role: str | None = None) -> Iterator[Matrix]:
        if kind == FULL:
            yield Matrix(f"{at}self_attn.qkv_proj", role or "attention", hidden, 2 * query + 2 * keys)
            yield Matrix(f"{at}self_attn.o_proj", role or "attention", query, hidden)
        else:
            values = model.gdn_value_heads * model.gdn_value_dim
            yield Matrix(f"{at}linear_attn.in_proj", "gdn", hidden, model.conv_channels + values)
            yield Matrix(f"{at}linear_attn.gate_proj", "gdn_gate", hidden, 2 * model.gdn_value_heads)
            yield Matrix(f"{at}linear_attn.out_proj", "gdn", values, hidden)
        yield Matrix(f"{at}mlp.gate_up_proj", role or "mlp", hidden, 2 * inner)
        yield Matrix(f"{at}mlp.down_proj", role or "mlp", inner, hidden)

    for number, kind in enumerate(model.layer_types):
        yield from layer(f"layers.{number}.", kind)
    if not model.tied_embeddings:
        yield Matrix("lm_head", "head", hidden, model.vocab_size)
    if mtp:
        yield Matrix("mtp.fc", "mtp", 2 * hidden, hidden)
        yield from layer("mtp.layers.0.", FULL, "mtp")
        if draft_head:
            yield Matrix("mtp.draft_head", "head", hidden, draft_head)


def _embedding(model: ModelConfig, format: WeightFormat | None, item: int) -> int:
    if format is None:
        return model.vocab_size * model.hidden_size * item
    return model.vocab_size * (model.hidden_size * format.bits // 8 + model.hidden_size // format.group * _BF16)


def _norms(model: ModelConfig, shape: Shape) -> int:
    # Those that are the prologue of a quantised projection are stored in two bytes, as checkpoints have them.
    before, hidden = (_F32 if shape.recipe is None else _BF16), model.hidden_size
    attention = 2 * model.head_dim * _F32
    total = model.layers * 2 * hidden * before + len(model.attention_layers) * attention
    total += len(model.gdn_layers) * model.gdn_value_dim * _F32 + hidden * _F32
    return total + (3 * hidden * _F32 + 2 * hidden * before + attention if shape.mtp else 0)


def vector(kv: str, head_dim: int) -> int:
    """Bytes of the key and the value of one token in one KV head."""
    check_format(kv, head_dim)
    eight, four = head_dim + head_dim // 64 * 2, head_dim // 2 + head_dim // 32
    parts = {"f32": (4 * head_dim,) * 2, "bf16": (2 * head_dim,) * 2, "int8": (eight, eight), "rk8v4": (eight, four)}
    return sum(parts.get(kv, (four, four)))


def page(model: ModelConfig, kv: str, mtp: bool) -> int:
    """Bytes of one page in all pools together, the MTP layer's among them where it drafts."""
    return vector(kv, model.head_dim) * model.kv_heads * PAGE * (len(model.attention_layers) + mtp)


def pages(model: ModelConfig, shape: Shape) -> int:
    """Bytes of all pools."""
    return page(model, shape.kv, shape.mtp) * shape.pages


def state(model: ModelConfig, shape: Shape) -> int:
    """Bytes of what else changes while an engine runs: recurrent states, rings, slots, sampling, masks, looked-up tokens."""
    item, rows, layers = ITEM[shape.dtype], shape.draft + 1, len(model.gdn_layers)
    ring = max(2 * rows, model.conv_width - 1 + rows)
    record = _keys(model) + _values(model) + 2 * model.gdn_value_heads  # k, v, and decay and beta of every value head
    recurrent = layers * (_matrices(model) + ring * (model.conv_channels * item + record * _F32))
    table = -(-shape.context // PAGE) * _INTEGER
    slot = table + (4 + shape.draft + rows) * _INTEGER + 2 * _FLAG + model.hidden_size * item
    waiting = 2 * _INTEGER
    sampling = (7 + 2 + 1 + _STOP_IDS) * _INTEGER + 2 * _FLAG + model.vocab_size * (2 * _INTEGER + _FLAG)
    masks = rows * -(-model.vocab_size // 32) * _INTEGER + _INTEGER
    history = shape.context * _INTEGER if shape.lookup else 0
    return shape.slots * (recurrent + slot + waiting + sampling + masks + history)


def staging(model: ModelConfig, shape: Shape) -> int:
    """Bytes of one slot's state on its way to the host or back."""
    item = ITEM[shape.dtype]
    window = (model.conv_width - 1) * model.conv_channels * item
    return len(model.gdn_layers) * (_matrices(model) + window) + model.hidden_size * item + 2 * _INTEGER + _FLAG


def _matrices(model: ModelConfig) -> int:
    """Bytes of a layer's recurrent states of one slot."""
    return model.gdn_value_heads * model.gdn_key_dim * model.gdn_value_dim * _F32


def _keys(model: ModelConfig) -> int:
    return model.gdn_key_heads * model.gdn_key_dim


def _values(model: ModelConfig) -> int:
    return model.gdn_value_heads * model.gdn_value_dim
