"""Compile JAX functions for a graphics card on a machine that has none.

XLA's CUDA compiler needs a description of the card (`targets/`), the CUDA plugin and `ptxas`, but no driver and no
device. Register spills, too much shared memory and operations the GPU backend lacks are real errors here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The plugin otherwise asks the driver for its version while JAX starts, and gives up where there is none.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_kernels import targets, tuned

# Newer JAX asks Pallas for a device kind it knows: a card of the same compute capability stands in for the others.
_KNOWN_KIND = {
    (8, 0): "NVIDIA A100-SXM4-80GB",
    (8, 6): "NVIDIA A10",
    (8, 9): "NVIDIA GeForce RTX 4090",
    (9, 0): "NVIDIA H200",
    (12, 0): "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
}
_INSTALL = "install the extra: pip install 'ninfer-jax[aot]'"


def missing_tools() -> list[str]:
    """The wheels of the `aot` extra that are not installed."""
    wanted = {
        "jax-cuda12-plugin": "jax_cuda12_plugin",
        "jax-cuda12-pjrt": "jax_plugins.xla_cuda12",
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


@functools.cache
def _mesh(target: str) -> jax.sharding.Mesh:
    card = targets.get(target)
    require_tools()
    try:
        topology = topologies.get_topology_desc(platform="cuda", target_config=card.proto, topology="1x1x1")
    except NotImplementedError as e:
        raise RuntimeError(
            "JAX started without its CUDA compiler: set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1, "
            "or import pallas_kernels.deviceless before the first JAX computation"
        ) from e
    return topologies.make_mesh(topology, (1,), ("x",))


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


def lower_for(fn: Callable, args: Sequence[Any], target: str = "rtx4090", *, donate: Sequence[int] = ()) -> jax.stages.Lowered:
    """`fn` traced and lowered for `target`; `args` and `donate` as in `compile_for`."""
    sharding = NamedSharding(_mesh(target), PartitionSpec())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tuple(args))
    mesh = _abstract_mesh(target)
    with tuned.card(target), jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
        return jax.jit(fn, donate_argnums=tuple(donate)).lower(*args)


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
    """What `lower_for` lowered, compiled; `dump_to` as in `compile_for`."""
    options = {
        "xla_gpu_autotune_level": 0,  # candidates cannot be timed without a device
        # XLA would compute small things again to save memory that nothing else wants: what has to fit is planned for.
        "xla_disable_hlo_passes": "rematerialization",
    }
    if dump_to is not None:
        options["xla_dump_to"] = str(dump_to)
        if jax.__version_info__ >= (0, 11):  # older versions dump the PTX unasked
            options["xla_dump_emitter_re"] = "ptx"
    return lowered.compile(compiler_options=options)
