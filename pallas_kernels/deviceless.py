"""Compile JAX functions for a graphics card on a machine that has none.

XLA's CUDA compiler needs a description of the card (`targets/`), the CUDA plugin and `ptxas`, but no driver and no
device. Register spills, too much shared memory and operations the GPU backend lacks are real errors here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_kernels import driver, launch, targets, tuned

# Newer JAX asks Pallas for a device kind it knows: a card of the same compute capability stands in for the others.
_KNOWN_KIND = {
    (8, 0): "NVIDIA A100-SXM4-80GB",
    (8, 6): "NVIDIA A10",
    (8, 9): "NVIDIA GeForce RTX 4090",
    (9, 0): "NVIDIA H200",
    (12, 0): "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
}
_INSTALL = "install the extra: pip install 'ninfer-jax[aot]'"
CUDA = 12  # whose compiler the extra brings
_PLUGIN, _UNCHECKED = f"jax_plugins.xla_cuda{CUDA}", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def missing_tools() -> list[str]:
    """The wheels of the `aot` extra that are not installed."""
    wanted = {
        "jax-cuda12-plugin": "jax_cuda12_plugin",
        "jax-cuda12-pjrt": _PLUGIN,
        "nvidia-cuda-nvcc-cu12": "nvidia.cuda_nvcc",
        "triton": "triton",
    }
    return [wheel for wheel, module in wanted.items() if not _installed(module)]


def _installed(module: str) -> bool:
    parent, _, _ = module.rpartition(".")
    if parent and importlib.util.find_spec(parent) is None:
        return False
    return importlib.util.find_spec(module) is not None


def require_tools() -> None:
    """RuntimeError, with what to install, where a part of the compiler is missing."""
    missing = missing_tools()
    if missing:
        raise RuntimeError(f"compiling for a card needs {', '.join(missing)}; {_INSTALL}")


def binary_tool(name: str) -> str:
    """The path of `ptxas`, `nvdisasm` or `cuobjdump` inside the installed wheels."""
    # XLA assembles with the nvcc wheel's ptxas, so that one comes first.
    for module, folder in (("nvidia.cuda_nvcc", "bin"), ("triton", "backends/nvidia/bin")):
        if _installed(module):
            spec = importlib.util.find_spec(module)
            for root in (spec and spec.submodule_search_locations) or ():
                if (Path(root) / folder / name).is_file():
                    return str(Path(root) / folder / name)
    raise RuntimeError(f"{name} is not in the installed wheels; {_INSTALL}")


def start(target: str = "rtx4090") -> None:
    """The compiler for `target`, ready. Before JAX's first computation it keeps JAX from complaining of a driver that is not
    there; after it, nothing is lost. ValueError for an unknown target, RuntimeError where the wheels are missing."""
    _mesh(target)


@functools.cache
def _mesh(target: str) -> jax.sharding.Mesh:
    card = targets.get(target)
    require_tools()

    def topology() -> topologies.TopologyDescription:
        return topologies.get_topology_desc(platform="cuda", target_config=card.proto, topology="1x1x1")

    try:
        # Starting JAX, if this does, the plugin asks the driver for its version and gives up where there is none.
        with contextlib.nullcontext() if driver.cuda_version() else _unchecked():
            found = topology()
    except NotImplementedError:
        # JAX had started before, and without the plugin: its devices are chosen, so that all this adds is the compiler.
        try:
            with _unchecked():
                importlib.import_module(_PLUGIN).initialize()
                found = topology()
        except Exception as error:
            raise RuntimeError(f"the CUDA compiler does not start: {error}".splitlines()[0]) from error
    return topologies.make_mesh(found, (1,), ("x",))


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """The plugin starts whatever the driver is, while this lasts: a process that computes on a card wants the check."""
    before = os.environ.get(_UNCHECKED)
    os.environ[_UNCHECKED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_UNCHECKED]
        else:
            os.environ[_UNCHECKED] = before


def _abstract_mesh(target: str) -> AbstractMesh | None:
    """The mesh to trace under; None where JAX needs none (before 0.11)."""
    if jax.__version_info__ < (0, 11):
        return None
    card, own = targets.get(target), _mesh(target).abstract_mesh
    if own.abstract_device is not None and own.abstract_device.device_kind in _KNOWN_KIND.values():
        return own
    fields = {"device_kind": _KNOWN_KIND[card.compute_capability], "num_cores": None}
    if "platform" in AbstractDevice.__dataclass_fields__:
        fields["platform"] = "gpu"
    return AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=AbstractDevice(**fields))


def lower_for(
    fn: Callable, args: Sequence[Any], target: str = "rtx4090", *, donate: Sequence[int] = (), keep_unused: bool = False
) -> jax.stages.Lowered:
    """`fn` traced and lowered for `target`; `args` and `donate` as in `compile_for`, keep_unused as in `jax.jit`."""
    sharding = NamedSharding(_mesh(target), PartitionSpec())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tuple(args))
    mesh = _abstract_mesh(target)
    with launch.quiet(), tuned.card(target), jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
        return jax.jit(fn, donate_argnums=tuple(donate), keep_unused=keep_unused).lower(*args)


def compile_for(
    fn: Callable, args: Sequence[Any], target: str = "rtx4090", *, donate: Sequence[int] = (), dump_to: str | Path | None = None
) -> jax.stages.Compiled:
    """`fn` compiled for a card that need not be present.

    args: trees of arrays or `jax.ShapeDtypeStruct`, replicated on the one device.
    donate: positions in `args` whose buffers the outputs may reuse.
    dump_to: folder for XLA's dumps (launches, PTX, buffers); `inspect.report` reads them.
    ValueError for an unknown target, RuntimeError where the compiler's wheels are missing.
    """
    return compile_lowered(lower_for(fn, args, target, donate=donate), dump_to=dump_to)


def compile_lowered(lowered: jax.stages.Lowered, dump_to: str | Path | None = None) -> jax.stages.Compiled:
    """The compiled program of what `lower_for` gave; `dump_to` as in `compile_for`."""
    options = dict(launch.COMPILER_OPTIONS)
    if dump_to is not None:
        options["xla_dump_to"] = str(dump_to)
        if jax.__version_info__ >= (0, 11):  # older versions dump the PTX unasked
            options["xla_dump_emitter_re"] = "ptx"
    return lowered.compile(compiler_options=options)
