"""Drives the programs the way an engine does, one sequence at a time, and reads the state back as NumPy arrays."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ninfer_jax.checkpoints import Checkpoint, load_parameters
from ninfer_jax.config import PAGE, EngineConfig, ModelConfig
from ninfer_jax.decoding import SamplingParams
from ninfer_jax.model import TextModel, fill, parameter_specs, split_model
from ninfer_jax.programs import PrefillInputs, Programs, RoundOutput, admission
from ninfer_jax.state import PageAllocator, State, allocate_state, state_shape
from pallas_kernels.kv_codecs import Packed

CHUNK = 256
CONTEXT = 320


class Harness:
    """A checkpoint loaded and its programs, compiled when first used. kernels: of the rounds, None for XLA's own."""

    def __init__(
        self,
        directory: Path,
        *,
        draft: int = 0,
        kv: str = "f32",
        dtype: jnp.dtype = jnp.float32,
        slots: int = 1,
        kernels: str | None = "cpu",
    ):
        self.config = ModelConfig.from_hf(directory)
        model = TextModel(self.config, dtype, mtp=draft > 0)
        self._graph, described = split_model(model)
        unused = () if draft else ("mtp.",)
        arrays = load_parameters(Checkpoint.open(directory), parameter_specs(model), ignore_prefixes=unused, device_put=jnp.asarray)
        self.parameters = fill(described, arrays)
        engine = EngineConfig(context=CONTEXT, slots=slots, draft=draft, kv=kv, prefill_chunk=CHUNK)
        self.shape = state_shape(self.config, engine, kv, dtype)
        self.programs = Programs(model, self.shape, CHUNK, self.config.vocab_size, "cpu", kernels)

    @property
    def model(self) -> TextModel:
        return nnx.merge(self._graph, self.parameters)

    def sequence(self) -> Sequence:
        return Sequence(self)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """`[tokens, hidden]`, at most a chunk of tokens -> float32 `[tokens, vocab]`, through the `head` program."""
        rows = np.zeros((CHUNK, hidden.shape[1]), hidden.dtype)
        rows[: len(hidden)] = hidden
        return np.asarray(self.programs.head(jax.tree.leaves(self.parameters), rows))[: len(hidden)]


class Sequence:
    """A greedy sequence in the last slot, which owns every second page, in descending order. The state is this object's own."""

    def __init__(self, harness: Harness):
        self._programs, self._parameters = harness.programs, jax.tree.leaves(harness.parameters)
        self._slot = np.int32(harness.shape.slots - 1)
        per_slot = harness.shape.pages_per_slot
        pages = PageAllocator(harness.shape.pages, per_slot).reserve(CONTEXT)
        self.table = pages[::-1].copy()
        params = SamplingParams(temperature=0.0, logprobs=20)
        state = allocate_state(harness.config, harness.shape)
        self.state: State = self._programs.admit(state, admission(int(self._slot), self.table, CONTEXT, params, 0, ()))

    def prefill(self, ids: np.ndarray, cut: int | None = None, positions: np.ndarray | None = None, padding: int = 0) -> np.ndarray:
        """Append `ids` in pieces of `cut` tokens; padding rows get the id `padding`. positions `[3, tokens]`: of the first chunk of
        a sequence where they are not the text's. Returns the final-normed hidden `[tokens, hidden]`."""
        start, cut = self.length, cut or CHUNK
        if positions is None:
            positions = np.broadcast_to(start + np.arange(len(ids)), (3, len(ids)))
        from_before = np.concatenate([positions[:, :1] - 1, positions], axis=1)
        out = []
        for at in range(0, len(ids), cut):
            piece = slice(at, min(at + cut, len(ids)))
            count = piece.stop - piece.start
            tokens = np.full(CHUNK, padding, np.int32)
            where = np.full((3, CHUNK + 1), padding, np.int32)
            tokens[:count], where[:, : count + 1] = ids[piece], from_before[:, at : piece.stop + 1]
            inputs = PrefillInputs(self._slot, tokens, np.int32(count), where)
            self.state, hidden = self._programs.prefill(self._parameters, self.state, inputs)
            out.append(np.asarray(hidden)[:count])
        return np.concatenate(out)

    def begin(self) -> RoundOutput:
        self.state, out = self._programs.begin(self._parameters, self.state, self._slot)
        return self._mine(out)

    def round(self, drafts: list[int] | None = None) -> RoundOutput:
        """One decode round; `drafts`, when given, replace what the MTP head proposed."""
        if drafts is not None:
            self._set(drafts=np.int32(drafts))
        self.state, out = self._programs.decode_round(self._parameters, self.state)
        return self._mine(out)

    def feed(self, token: int) -> RoundOutput:
        """Consume exactly this token, whatever was emitted before: the only one left, so that no draft can be accepted after it."""
        self._set(token=np.int32(token), left=np.int32(1), active=True)
        return self.round()

    def turn(self, rope_delta: int) -> None:
        """Later tokens stand at RoPE position index + rope_delta."""
        self._set(rope_delta=np.int32(rope_delta))

    @property
    def length(self) -> int:
        return int(self.state.slots.length[self._slot])

    @property
    def drafts(self) -> list[int]:
        return np.asarray(self.state.slots.drafts[self._slot]).tolist()

    @property
    def recurrent(self) -> list[np.ndarray]:
        self.state = self._programs.settle(self.state)
        return [np.asarray(x[self._slot]) for x in self.state.recurrent]

    @property
    def conv(self) -> list[np.ndarray]:
        self.state = self._programs.settle(self.state)
        return [np.asarray(x[self._slot, : self._programs.config.conv_width - 1]) for x in self.state.conv]

    def pages(self, tokens: int) -> list[tuple[Packed, Packed]]:
        """Packed keys and values of the first `tokens` tokens, a pair a full-attention layer, leaves `[tokens, kv_heads, ...]`."""
        return [self._read(pool, tokens) for pool in self.state.kv]

    def mtp_pages(self, tokens: int) -> tuple[Packed, Packed]:
        return self._read(self.state.mtp_kv, tokens)

    def _read(self, pool, tokens: int) -> tuple[Packed, Packed]:
        at = np.arange(tokens)
        page, offset = self.table[at // PAGE], at % PAGE

        def read(leaf: jax.Array) -> np.ndarray:
            rows = np.asarray(leaf)[page, :, offset]
            return rows.view(jnp.bfloat16) if rows.dtype == np.uint16 else rows  # bfloat16 pages are kept as words

        return tuple(jax.tree.map(read, part) for part in (pool.k, pool.v))

    def _set(self, **values) -> None:
        slots = self.state.slots
        changed = {name: getattr(slots, name).at[self._slot].set(value) for name, value in values.items()}
        self.state = self.state._replace(slots=slots._replace(**changed))

    def _mine(self, out: RoundOutput) -> RoundOutput:
        return jax.tree.map(lambda x: np.asarray(x)[self._slot], out)
