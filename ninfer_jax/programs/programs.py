"""The engine's programs: compiled ahead of their first use for one set of shapes, the state donated to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ninfer_jax.decoding import SamplingParams
from ninfer_jax.model import TextModel
from ninfer_jax.programs.decode import RoundOutput, begin, decode_round
from ninfer_jax.programs.pending import settle
from ninfer_jax.programs.prefill import PrefillInputs, prefill_chunk
from ninfer_jax.programs.slots import Admission, admission, admit, release
from ninfer_jax.state import State, StateShape, allocate_state, state_struct
from pallas_kernels import cpu
from pallas_kernels.launch import COMPILER_OPTIONS, lowering_for

Compiled = Any  # `jax.stages.Compiled`, or what stands in for one
# What `compile_all` compiles. The state is allocated by a program too: one kernel launch instead of one compilation an array.
ALWAYS = ("allocate", "admit", "release", "prefill", "begin", "decode_round")
# Those that run while the engine serves, beside weights and state; `allocate` runs before.
SERVING = tuple(name for name in ALWAYS if name != "allocate")


class Programs:
    """`allocate`, `admit`, `release`, `prefill`, `begin`, `decode_round`, `head` and `settle`, each for exactly one shape.

    Parameters go in as the leaves of the model's state, `jax.tree.leaves(fill(...))`: to flatten the state itself would
    take longer than everything else the host does in a round (0.6 of 1.1 ms for 160 arrays, measured on a CPU).
    All but `allocate` and `head` take the state, whose buffers they reuse, and return the new one first. `compile_all`
    compiles everything but `head` (logits of a whole chunk, for scoring) and `settle` (states that nothing is missing from,
    to be looked at); these are compiled when first asked for. platform: "cpu" or "cuda". kernels: the form that ops take
    where they have it (`launch.lowering_for`).
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
        self._parameters = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

        self._graph, self._structure = graph, structure
        flat = nnx.to_flat_state(described)
        self._names = [".".join(map(str, path)) for path, _ in flat]
        self._roles = [leaf.get_metadata()["role"] for _, leaf in flat]
        self._functions = _functions(self.build, shape.kv, valid_ids)
        self._functions["settle"] = (partial(settle, width=model.config.conv_width), (0,))
        self._functions["allocate"] = (partial(allocate_state, model.config, shape), ())
        self._compiled: dict[str, Compiled] = {}

    def result(self, name: str) -> Any:
        """A tree of placeholders with the structure of what the named program returns."""
        state = state_struct(self.config, self.shape)
        placeholders: Any = RoundOutput._fields
        outputs = RoundOutput(*placeholders)
        return {"allocate": state, "admit": state, "release": state, "settle": state, "prefill": (state, 0), "head": 0}.get(
            name, (state, outputs)
        )

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

    def compile_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile what generation needs, telling `progress` how many programs of how many are done."""
        for done, name in enumerate(ALWAYS, 1):
            self._get(name)
            if progress:
                progress(done, len(ALWAYS))

    def allocate(self) -> State:
        """A zeroed state: every slot empty, every page free."""
        return self._get("allocate")()

    def lowered(self, name: str) -> jax.stages.Lowered:
        """The named program before compilation, for inspection."""
        return self._lower(*self.source(name))

    def source(self, name: str) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
        """The named program's function, the shapes of its arguments, and which of them it may overwrite: what compiling it
        for another machine takes."""
        function, donated = self._functions[name]
        return function, self._arguments(name), donated

    def compiled(self, name: str) -> jax.stages.Compiled:
        """The named program, compiled."""
        return self._get(name)

    def compile_as(self, function: Callable[..., Any], arguments: tuple[Any, ...], donated: tuple[int, ...]) -> jax.stages.Compiled:
        """A function of the caller's own, compiled as the programs are. arguments, donated: as `source` has them."""
        return self._lower(function, arguments, donated).compile(compiler_options(self.platform))

    def admit(self, state: State, new: Admission) -> State:
        return self._get("admit")(state, new)

    def release(self, state: State, slot: jax.Array) -> State:
        return self._get("release")(state, slot)

    def settle(self, state: State) -> State:
        """`state` with all that was accepted in its recurrent states."""
        return self._get("settle")(state)

    def prefill(self, parameters: Sequence[jax.Array], state: State, inputs: PrefillInputs) -> tuple[State, jax.Array]:
        return self._get("prefill")(parameters, state, inputs)

    def begin(self, parameters: Sequence[jax.Array], state: State, slot: jax.Array) -> tuple[State, RoundOutput]:
        return self._get("begin")(parameters, state, slot)

    def decode_round(self, parameters: Sequence[jax.Array], state: State) -> tuple[State, RoundOutput]:
        return self._get("decode_round")(parameters, state)

    def head(self, parameters: Sequence[jax.Array], hidden: jax.Array) -> jax.Array:
        """Final-normed hidden `[chunk, hidden]` -> float32 logits `[chunk, vocab]`."""
        return self._get("head")(parameters, hidden)

    def _lower(self, function: Callable[..., Any], arguments: tuple[Any, ...], donated: tuple[int, ...]) -> jax.stages.Lowered:
        try:
            with lowering_for(self.platform, self.kernels):
                return jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*arguments)
        except cpu.KernelError as error:
            raise ValueError(f"kernels: {error}") from None

    def _get(self, name: str) -> Compiled:
        if name not in self._compiled:
            self._compiled[name] = self.lowered(name).compile(compiler_options(self.platform))
        return self._compiled[name]

    def _arguments(self, name: str) -> tuple[Any, ...]:
        state = state_struct(self.config, self.shape)
        struct: Any = jax.ShapeDtypeStruct
        integer, tokens = struct((), jnp.int32), struct((self.chunk,), jnp.int32)
        table = state.slots.table
        if name == "allocate":
            return ()
        if name == "admit":
            example = admission(0, np.zeros(table.shape[1], np.int32), 1, SamplingParams(), 0, ())
            return state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), example)
        if name == "release":
            return state, integer
        if name == "settle":
            return (state,)
        if name == "prefill":
            positions = struct((3, self.chunk), jnp.int32)
            return self._parameters, state, PrefillInputs(integer, tokens, tokens, integer, positions)
        if name == "begin":
            return self._parameters, state, integer
        if name == "decode_round":
            return self._parameters, state
        return self._parameters, struct((self.chunk, self.config.hidden_size), self.shape.dtype)


def compiler_options(platform: str) -> dict[str, Any] | None:
    """XLA's options for programs on "cpu" or "cuda", compiled there or elsewhere."""
    return dict(COMPILER_OPTIONS) if platform != "cpu" else None


def _functions(
    build: Callable[[Sequence[jax.Array]], TextModel], kv: str, valid_ids: int
) -> dict[str, tuple[Callable[..., Any], tuple[int, ...]]]:
    """Each program as a function of arrays, and the arguments it may overwrite."""

    def with_model(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda parameters, *rest: function(build(parameters), *rest)

    return {
        "admit": (admit, (0,)),
        "release": (release, (0,)),
        "prefill": (with_model(partial(prefill_chunk, kv=kv)), (1,)),
        "begin": (with_model(partial(begin, kv=kv, valid_ids=valid_ids)), (1,)),
        "decode_round": (with_model(partial(decode_round, kv=kv, valid_ids=valid_ids)), (1,)),
        "head": (with_model(lambda model, hidden: model.logits(hidden)), ()),
    }
