"""The projections of the 27B, as the model calls them: shared by tests, compile checks and the lab."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.matmul import head, kernel, pair, prefill, quantised, reference

HIDDEN, INTERMEDIATE = 5120, 17408
# Rows of the head, and how many of them a tokenizer can name; the rest is never sampled.
VOCABULARY, NAMED = 248320, 248077


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `quantised_linear`: x `[rows, k]` @ `[k, n]`."""

    name: str
    k: int
    n: int
    rows: int = 16
    bits: int = 4
    group: int = 64
    norm: bool = False
    swiglu: bool = False
    residual: bool = False
    activations: str = "bf16"

    op = "quantised_matmul"

    @property
    def decode(self) -> bool:
        return self.rows <= kernel.ROWS

    @property
    def out_columns(self) -> int:
        return self.n // 2 if self.swiglu else self.n

    def arguments(self) -> list[Any]:
        """Shape structs for `call`."""
        struct = jax.ShapeDtypeStruct
        return [
            struct((self.rows, self.k), jnp.bfloat16),
            quantised.structure(self.k, self.n, self.bits, self.group),
            struct((self.k,), jnp.bfloat16) if self.norm else None,
            struct((self.rows, self.out_columns), jnp.bfloat16) if self.residual else None,
        ]

    def call(
        self, x: Any, weight: Any, norm: Any, residual: Any, interpret: bool = False, config: kernel.Config | None = None
    ) -> jax.Array:
        """The kernel alone."""
        if self.decode:
            return kernel.decode(x, weight, norm, residual, swiglu=self.swiglu, config=config, interpret=interpret)
        return prefill.prefill(x, weight, residual, route=self.activations, swiglu=self.swiglu, interpret=interpret)

    @property
    def key(self) -> str:
        return kernel.shape_key(self.k, self.n, self.bits, self.group, self.norm, self.swiglu)

    def configs(self) -> list[kernel.Config]:
        """Candidate block sizes, the default first: three widths, deeper loads, fewer warps."""
        if not self.decode:
            return []
        default = kernel.default_config(self.out_columns, self.group, self.swiglu)
        base = 2 if self.group == 128 else 3
        found = [default, dataclasses.replace(default, stages=default.stages + 1)]
        for wide in (32, 64, 128):
            columns = wide // 2 if self.swiglu else wide
            found.append(kernel.Config(columns, max(4, wide // 16), base + (wide == 32)))
        found.append(dataclasses.replace(default, warps=default.warps // 2))
        return list(dict.fromkeys(found))

    def fill(self, key: jax.Array) -> list[Any]:
        """Arguments for timing: random codes and scales. The head would not fit beside its float32 twin."""
        leaves, tree = jax.tree.flatten(self.arguments())
        keys = jax.random.split(key, len(leaves))
        return tree.unflatten([_random(k, leaf) for k, leaf in zip(keys, leaves, strict=True)])

    def sample(self, key: jax.Array) -> list[Any]:
        """Random arguments for `call`."""
        keys = jax.random.split(key, 4)
        weight = jax.random.normal(keys[1], (self.k, self.n), jnp.float32) / self.k**0.5
        return [
            jax.random.normal(keys[0], (self.rows, self.k), jnp.bfloat16),
            quantised.quantise(weight, bits=self.bits, group=self.group),
            0.2 * jax.random.normal(keys[2], (self.k,), jnp.bfloat16) if self.norm else None,
            jax.random.normal(keys[3], (self.rows, self.out_columns), jnp.bfloat16) if self.residual else None,
        ]

    def reference(self, x: Any, weight: Any, norm: Any, residual: Any) -> jax.Array:
        return reference.quantised_linear(x, weight, norm, residual, swiglu=self.swiglu)

    @property
    def allowed_error(self) -> float:
        return 4e-2 if self.activations == "int8" else 4e-3

    @property
    def weight_bytes(self) -> int:
        return quantised.ideal_bytes(self.k, self.n, self.bits, self.group)

    @property
    def ideal_bytes(self) -> int:
        """Codes, scales, units, inputs and outputs, each once."""
        small = self.rows * self.k + self.k * self.norm + self.rows * self.out_columns * (1 + self.residual)
        return self.weight_bytes + 2 * small

    @property
    def multiply_adds(self) -> int:
        return max(self.rows, kernel.ROWS) * self.k * self.n

    def tensor_ops(self) -> int:
        """Warp-wide tensor-core instructions of the case: m16n8k16 of bf16, m16n8k32 of int8."""
        return self.multiply_adds // (4096 if self.activations == "int8" else 2048)

    def other_trips(self) -> tuple[int, ...]:
        """Passes of the loops without tensor-core work."""
        return (-(-self.k // kernel.NORM_CHUNK),) if self.norm and self.decode else ()


@dataclasses.dataclass(frozen=True)
class HeadCase(Case):
    """Candidates of the output head: `keep` a block of columns."""

    keep: int = 1
    valid: int = NAMED

    op = "head"

    def configs(self) -> list[kernel.Config]:
        """None: a block's columns are what candidates are kept of."""
        return []

    def call(self, x: Any, weight: Any, norm: Any, residual: None, interpret: bool = False) -> Any:
        return head.block_candidates(x, weight, norm, keep=self.keep, valid=self.valid, interpret=interpret)[0]

    def reference(self, x: Any, weight: Any, norm: Any, residual: None) -> jax.Array:
        # The kernel computes all 16 rows of its tile, the missing ones from zeros.
        x = jnp.pad(x, ((0, kernel.ROWS - self.rows), (0, 0)))
        logits = reference.quantised_linear(x, weight, norm, out_dtype=jnp.float32)[:, : self.valid]
        logits = jnp.pad(logits, ((0, 0), (0, -self.valid % head.BLOCK)), constant_values=-jnp.inf)
        blocks = jnp.swapaxes(logits.reshape(kernel.ROWS, -1, head.BLOCK), 0, 1)
        return jax.lax.top_k(blocks, self.keep)[0]

    @property
    def ideal_bytes(self) -> int:
        candidates = 8 * kernel.ROWS * self.keep * -(-self.n // head.BLOCK)
        return self.weight_bytes + 2 * (self.rows * self.k + self.k) + candidates


@dataclasses.dataclass(frozen=True)
class PairCase(Case):
    """One call of `quantised_linear_pair`: also x @ `[k, narrow]` of w8 g128.

    Instructions are counted as if every block did its share of both bodies, each block's code outside loops whole.
    """

    narrow: int = 96

    op = "quantised_matmul_pair"
    narrow_bits, narrow_group = 8, 128

    def arguments(self) -> list[Any]:
        x, weight, norm, _ = super().arguments()
        return [x, weight, quantised.structure(self.k, self.narrow, self.narrow_bits, self.narrow_group), norm]

    def configs(self) -> list[kernel.Config]:
        """None: with deeper loads an SM would not hold a block of each."""
        return []

    def call(self, x: Any, weight: Any, narrow: Any, norm: Any, interpret: bool = False) -> Any:
        return pair.decode(x, weight, narrow, norm, interpret=interpret)

    def sample(self, key: jax.Array) -> list[Any]:
        x, weight, norm, _ = super().sample(key)
        other = jax.random.normal(jax.random.fold_in(key, 1), (self.k, self.narrow), jnp.float32) / self.k**0.5
        return [x, weight, quantised.quantise(other, bits=self.narrow_bits, group=self.narrow_group), norm]

    def reference(self, x: Any, weight: Any, narrow: Any, norm: Any) -> Any:
        return tuple(reference.quantised_linear(x, w, norm) for w in (weight, narrow))

    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes + quantised.ideal_bytes(self.k, self.narrow, self.narrow_bits, self.narrow_group)

    @property
    def ideal_bytes(self) -> int:
        return super().ideal_bytes + 2 * self.rows * self.narrow

    @property
    def multiply_adds(self) -> int:
        return kernel.ROWS * self.k * (self.n + self.narrow)

    def other_trips(self) -> tuple[float, ...]:
        """A block sums the squares in one of two loops."""
        return tuple(n / 2 for n in super().other_trips()) * 2


def _random(key: jax.Array, leaf: Any) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        bits = jax.random.bits(key, leaf.shape, f"uint{8 * leaf.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(bits, leaf.dtype)
    return (0.01 * jax.random.normal(key, leaf.shape, leaf.dtype)).astype(leaf.dtype)


def _twin(case: Case, k: int, n: int, rows: int) -> Case:
    small = {"valid": n - 7} if isinstance(case, HeadCase) else {"narrow": 40} if isinstance(case, PairCase) else {}
    return dataclasses.replace(case, name=case.name + ".small", k=k, n=n, rows=rows, **small)


DECODE = (
    Case("attention.qkv_gate", HIDDEN, 14336, norm=True),
    Case("attention.out", 6144, HIDDEN, residual=True),
    Case("delta.qkvz", HIDDEN, 16384, norm=True),
    Case("delta.out", 6144, HIDDEN, residual=True),
    Case("mlp.gate_up", HIDDEN, 2 * INTERMEDIATE, norm=True, swiglu=True),
    Case("mlp.down", INTERMEDIATE, HIDDEN, residual=True),
    Case("mtp.fc", 2 * HIDDEN, HIDDEN, bits=8, group=128),
    Case("head.logits", HIDDEN, VOCABULARY, bits=8, group=128, norm=True),
    Case("mlp.gate_up.g32", HIDDEN, 2 * INTERMEDIATE, group=32, norm=True, swiglu=True),
    Case("mlp.down.g128", INTERMEDIATE, HIDDEN, group=128, residual=True),
)
PREFILL = (
    Case("mlp.gate_up.prefill", HIDDEN, 2 * INTERMEDIATE, rows=1024, swiglu=True),
    Case("mlp.down.prefill", INTERMEDIATE, HIDDEN, rows=1024, residual=True),
    Case("mlp.gate_up.prefill_int8", HIDDEN, 2 * INTERMEDIATE, rows=1024, swiglu=True, activations="int8"),
    Case("mlp.down.prefill_int8", INTERMEDIATE, HIDDEN, rows=1024, residual=True, activations="int8"),
    Case("mtp.fc.prefill", 2 * HIDDEN, HIDDEN, rows=1024, bits=8, group=128),
    Case("mtp.fc.prefill_int8", 2 * HIDDEN, HIDDEN, rows=1024, bits=8, group=128, activations="int8"),
)
HEAD = (
    HeadCase("argmax", HIDDEN, VOCABULARY, bits=8, group=128, norm=True),
    HeadCase("top_k", HIDDEN, VOCABULARY, bits=8, group=128, norm=True, keep=head.KEEP),
)
PAIR = (PairCase("delta.inputs", HIDDEN, 16384, norm=True),)
CASES = DECODE + PREFILL + HEAD + PAIR
# Twins a CPU interprets in a moment; none of their sizes is a multiple of a block.
SMALL = tuple(
    _twin(case, 300 if case.group < 128 else 700, 256 if case.swiglu else 200, 5 if case.decode else 150) for case in CASES
)
