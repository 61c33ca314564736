"""The engine's programs: compiled ahead of their first use for one set of shapes, the state donated to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from ninfer_jax.model import TextModel
from ninfer_jax.programs.catalogue import CATALOGUE, Given
from ninfer_jax.programs.decode import RoundOutput
from ninfer_jax.programs.prefill import PrefillInputs
from ninfer_jax.programs.slots import Admission
from ninfer_jax.programs.snapshots import Snapshot, page_bytes
from ninfer_jax.state import State, StateShape
from pallas_kernels import cpu
from pallas_kernels.launch import COMPILER_OPTIONS, lowering_for

Compiled = Any  # `jax.stages.Compiled`, or what stands in for one


class Programs:
    """The programs of the catalogue, each for exactly one shape.

    Parameters go in as the leaves of the model's state, `jax.tree.leaves(fill(...))`: to flatten the state itself would
    take longer than everything else the host does in a round (0.6 of 1.1 ms for 160 arrays, measured on a CPU).
    Those that take the state reuse its buffers and return the new one first, but for `read_page`, which leaves it as it is.
    platform: "cpu" or "cuda". kernels: the form that ops take where they have it (`launch.lowering_for`).
    """

    def __init__(
        self,
        model: TextModel,
        shape: StateShape,
        prefill_chunk_tokens: int,
        valid_ids: int,
        platform: str,
        kernels: str | None = None,
    ):
        graph, described = nnx.split(model)
        leaves, structure = jax.tree.flatten(described)
        self.shape, self.chunk, self.config = shape, prefill_chunk_tokens, model.config
        self.platform, self.kernels = platform, kernels
        self._graph, self._structure = graph, structure
        flat = nnx.to_flat_state(described)
        self._names = [".".join(map(str, path)) for path, _ in flat]
        self._roles = [leaf.get_metadata()["role"] for _, leaf in flat]
        parameters = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        self._given = Given(self.build, parameters, model.config, shape, prefill_chunk_tokens, valid_ids)
        self.short = self._given.short  # rows of the smaller prefill program, None without one
        self._catalogue = {program.name: program for program in CATALOGUE if program.made(self._given)}
        self._compiled: dict[str, Compiled] = {}
        self._take: Callable[[str], Compiled] = self.compile

    @property
    def eager(self) -> tuple[str, ...]:
        """Names of the programs that `compile_all` compiles, in its order."""
        return tuple(name for name, program in self._catalogue.items() if program.eager)

    @property
    def serving(self) -> tuple[str, ...]:
        """Names of those that run beside weights and state while an engine serves."""
        return tuple(name for name, program in self._catalogue.items() if program.serving)

    @property
    def staging_bytes(self) -> int:
        """Bytes of a snapshot: one may be on the device beside the state."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._given.snapshot))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all pools together."""
        return page_bytes(self._given.state)

    def workspace(self, name: str, compiled_bytes: int) -> int:
        """Bytes that the named program takes beside weights, state and staging, of those that its compiler counts."""
        return max(0, compiled_bytes - (self.staging_bytes if self._catalogue[name].staged else 0))

    def result(self, name: str) -> Any:
        """A tree of placeholders with the structure of what the named program returns."""
        return self._catalogue[name].result(self._given)

    def adopt(self, name: str, compiled: Compiled) -> None:
        """Use `compiled` as the named program."""
        self._compiled[name] = compiled

    def build(self, parameters: Sequence[jax.Array]) -> TextModel:
        """The model over these parameters, inside a traced function or outside."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._structure, parameters))

    def names(self) -> list[str]:
        """The name of each parameter ("layers.3.mlp.down_proj.words"), in their order."""
        return self._names

    def roles(self) -> list[str]:
        """The role of each parameter, in their order."""
        return self._roles

    def take_from(self, take: Callable[[str], Compiled]) -> None:
        """Have `take(name)` give the programs that are not there yet, in the place of `compile`."""
        self._take = take

    def compile_all(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compile what serving needs. progress: called with the name of the program that is next ("" at the end), how many are
        done, and how many there are."""
        for done, name in enumerate(self.eager):
            if progress and name not in self._compiled:
                progress(name, done, len(self.eager))
            self.compiled(name)
        if progress:
            progress("", len(self.eager), len(self.eager))

    def lowered(self, name: str) -> jax.stages.Lowered:
        """The named program before compilation, for inspection."""
        function, arguments, donated = self.source(name)
        try:
            with lowering_for(self.platform, self.kernels):
                return jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*arguments)
        except cpu.KernelError as error:
            raise ValueError(f"kernels: {error}") from None

    def source(self, name: str) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
        """The named program's function, the shapes of its arguments, and which of them it may overwrite: what compiling it
        for another machine takes."""
        program = self._catalogue[name]
        return program.function(self._given), program.arguments(self._given), program.donated

    def compiled(self, name: str) -> Compiled:
        """The named program, compiled."""
        if name not in self._compiled:
            self._compiled[name] = self._take(name)
        return self._compiled[name]

    def compile(self, name: str) -> Compiled:
        """The named program, compiled anew."""
        return self.lowered(name).compile(compiler_options(self.platform))

    def allocate(self) -> State:
        """A zeroed state: every slot empty, every page free."""
        return self.compiled("allocate")()

    def admit(self, state: State, new: Admission) -> State:
        return self.compiled("admit")(state, new)

    def release(self, state: State, slot: jax.Array) -> State:
        return self.compiled("release")(state, slot)

    def constrain(self, state: State, slot: jax.Array, words: jax.Array, drafts: jax.Array) -> State:
        return self.compiled("constrain")(state, slot, words, drafts)

    def settle(self, state: State) -> State:
        """`state` with all that was accepted in its recurrent states."""
        return self.compiled("settle")(state)

    def prefill(self, parameters: Sequence[jax.Array], state: State, inputs: PrefillInputs) -> tuple[State, jax.Array]:
        """Append a chunk: of `chunk` rows, or of `short`."""
        return self.compiled(self._by_rows("prefill", inputs.tokens))(parameters, state, inputs)

    def begin(self, parameters: Sequence[jax.Array], state: State, slot: jax.Array) -> tuple[State, RoundOutput]:
        return self.compiled("begin")(parameters, state, slot)

    def decode_round(self, parameters: Sequence[jax.Array], state: State) -> tuple[State, RoundOutput]:
        return self.compiled("decode_round")(parameters, state)

    def step(self, parameters: Sequence[jax.Array], state: State, slot: jax.Array, token: jax.Array) -> tuple[State, jax.Array]:
        return self.compiled("step")(parameters, state, slot, token)

    def snapshot(self, state: State, slot: jax.Array) -> tuple[State, Snapshot]:
        return self.compiled("snapshot")(state, slot)

    def restore(self, state: State, slot: jax.Array, given: Snapshot, tokens: jax.Array) -> State:
        return self.compiled("restore")(state, slot, given, tokens)

    def read_page(self, state: State, page: jax.Array) -> jax.Array:
        return self.compiled("read_page")(state, page)

    def write_page(self, state: State, page: jax.Array, data: jax.Array) -> State:
        return self.compiled("write_page")(state, page, data)

    def copy_page(self, state: State, source: jax.Array, target: jax.Array) -> State:
        return self.compiled("copy_page")(state, source, target)

    def head(self, parameters: Sequence[jax.Array], hidden: jax.Array) -> jax.Array:
        """Final-normed hidden `[rows, hidden]` of a prefill call -> float32 logits `[rows, vocab]`."""
        return self.compiled(self._by_rows("head", hidden))(parameters, hidden)

    def _by_rows(self, name: str, given: jax.Array) -> str:
        return name if len(given) == self.chunk else f"{name}_short"


def compiler_options(platform: str) -> dict[str, Any] | None:
    """XLA's options for programs on "cpu" or "cuda", compiled there or elsewhere."""
    return dict(COMPILER_OPTIONS) if platform != "cpu" else None
