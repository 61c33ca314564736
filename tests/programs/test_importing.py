"""Importing the packages changes nothing of the process that imports them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# Everything that the project's dependencies do to a process when they are imported is done before the first look.
CHILD = """
import gc, importlib, json, locale, logging, os, pkgutil, signal, sys, threading, warnings
import flax.nnx, gguf, jax, jax.numpy, jinja2, jinja2.meta, jinja2.sandbox, matplotlib, ml_dtypes, numpy, rich.progress
import safetensors.numpy, tokenizers, typer
from jax.experimental import pallas, serialize_executable, topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.pallas import triton
from jax._src import monitoring, xla_bridge

def settings():
    loggers = {n: (l.level, len(l.handlers), l.disabled, l.propagate, len(l.filters))
               for n, l in logging.Logger.manager.loggerDict.items() if isinstance(l, logging.Logger)}
    return {
        "environment": dict(os.environ),
        "jax": {k: str(v) for k, v in jax.config.values.items()},
        "jax started": xla_bridge.backends_are_initialized(),
        "jax listeners": len(monitoring.get_event_duration_listeners()) + len(monitoring.get_event_listeners()),
        "warnings": [str(f) for f in warnings.filters],
        "signals": {str(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
        "hooks": [str(h) for h in (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook)],
        "root logger": [logging.root.level, len(logging.root.handlers), logging.root.manager.disable],
        "loggers": {n: v for n, v in loggers.items() if v[:3] != (0, 0, False) or not v[3]},
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), str(gc.get_threshold()), sys.get_int_max_str_digits()],
        "numpy": [str(numpy.geterr()), str(numpy.get_printoptions())],
        "locale": str(locale.setlocale(locale.LC_ALL)),
        "threads": threading.active_count(),
        "path": sys.path,
        "folder": os.getcwd(),
    }

before = settings()
import ninfer_jax
[getattr(ninfer_jax, name) for name in ninfer_jax.__all__]
after = settings()
for package in ("ninfer_jax", "pallas_kernels"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__") and not module.name.startswith(OUT):
            importlib.import_module(module.name)
print(json.dumps([before, after, settings()]))
"""


# Programs of their own, and a kernel's body that an extra brings the compiler for.
LEFT_OUT = ("ninfer_jax.cli", "pallas_kernels.lab", "pallas_kernels.matmul.triton_body")


def changed(before: dict, after: dict) -> dict:
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def test_importing_leaves_the_process_as_it_was() -> None:
    """Of the package as users import it, and of every module of both packages."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_SKIP", "XLA_"))}
    code = CHILD.replace("OUT", repr(LEFT_OUT))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    before, imported, everything = json.loads(done.stdout)
    assert changed(before, imported) == {}
    assert changed(before, everything) == {}
