"""What stands in the manifest of compiled programs for the code, the compiler and the machine; cards are stood in for."""

from __future__ import annotations

import ast
import collections
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.experimental import serialize_executable

from ninfer_jax.config import EngineConfig
from ninfer_jax.programs import executables, provenance
from ninfer_jax.programs.card import Compilation
from ninfer_jax.programs.executables import MANIFEST, StoredPrograms, compile_to
from ninfer_jax.programs.setup import model_of, resolve
from pallas_kernels import driver, tuned

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ninfer_jax", "pallas_kernels")
# Imported by the code that is traced and no part of it: what lies in files, the devices that may be compiled for, and sizes
# that have a field of their own.
BESIDE = (
    "ninfer_jax/checkpoints/",
    "ninfer_jax/files.py",
    "pallas_kernels/targets/",
    "pallas_kernels/tuned/",
    "ninfer_jax/config/presets.py",
)


def file_of(module: str) -> str | None:
    path = module.replace(".", "/")
    return next((f for f in (f"{path}.py", f"{path}/__init__.py") if (ROOT / f).is_file()), None)


def imported_by(file: str) -> set[str]:
    """The project's own files that a file imports, inside functions too; packages above count, the top ones do not."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {f for name in names if name.partition(".")[0] in PACKAGES and "." in name and (f := file_of(name))}


def test_all_code_that_programs_are_traced_from_is_in_the_digest() -> None:
    """The closure of imports from the module that lists the programs, against the rule that picks files by folder."""
    found, todo = set(), ["ninfer_jax/programs/programs.py"]
    while todo:
        if (file := todo.pop()) not in found and not file.startswith(BESIDE):
            found.add(file)
            todo += imported_by(file)
    digested = {name for name, _ in provenance._sources(None)}
    assert {"pallas_kernels/delta_fold/kernel.py", "ninfer_jax/decoding/sampling.py", "ninfer_jax/state/layout.py"} <= found
    # Counts compilations, and names the others of its folder.
    assert found - digested - {"ninfer_jax/programs/compilations.py"} == set()


def test_the_digest_is_of_the_code_and_of_nothing_else(tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=lambda _, names: [n for n in names if n == "__pycache__"])
    before = provenance._digest_of(tmp_path)
    assert before == provenance.code_digest()

    def changes(file: str, change: bytes = b"\n# another line\n") -> bool:
        whole = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(whole + change if change else whole.replace(b"\n", b"\r\n"))
        after = provenance._digest_of(tmp_path)
        (tmp_path / file).write_bytes(whole)
        return after != before

    for file in ("pallas_kernels/delta_decode/kernel.py", "ninfer_jax/model/gdn.py", "ninfer_jax/programs/verify.py"):
        assert changes(file), file
    for file in (
        "ninfer_jax/cli/bench.py",
        "ninfer_jax/programs/plan.py",
        "pallas_kernels/matmul/cases.py",
        "ninfer_jax/text/stop.py",
    ):
        assert not changes(file), file
    assert not changes("ninfer_jax/model/gdn.py", b"")  # line ends of another checkout
    (tmp_path / "pallas_kernels/new.py").write_text("")
    assert provenance._digest_of(tmp_path) != before


CARD = "NVIDIA GeForce RTX 4090"
CONFIG = EngineConfig(context=64, prefill_chunk=64, draft=0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with an RTX 4090, CUDA 12.9's plugin 0.10.2 and a driver for 12.8, as far as loading programs asks."""
    device = SimpleNamespace(platform="gpu", device_kind=CARD, client=SimpleNamespace(platform_version="PJRT C API\ncuda 12090"))
    here = SimpleNamespace(device=device, driver=(12, 8), plugins={12: "0.10.2"})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(driver, "cuda_version", lambda: here.driver)
    monkeypatch.setattr(provenance, "plugin", lambda cuda: f"jax-cuda{cuda}-pjrt {here.plugins.get(cuda)}")
    return here


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: SimpleNamespace) -> Path:
    """What `compile_to` writes for the card, the compiler stood in for."""
    facts = Compilation("", "rtx4090", 0.0, 0.0, collections.Counter(), 0, 0, 0, 0, 0, 100, 60, 50, 7)
    monkeypatch.setattr(executables, "compile_program", lambda name, source, target: (name, facts))
    monkeypatch.setattr(serialize_executable, "serialize", lambda compiled: (compiled.encode(), None, None))
    compile_to(tmp_path, resolve(*model_of("tiny"), CONFIG, "cuda"), "rtx4090")
    return tmp_path


def opened(folder: Path) -> StoredPrograms:
    setup = resolve(*model_of("tiny"), CONFIG, "cuda")
    return StoredPrograms.open(folder, setup, setup.programs())


def refused(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        opened(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_programs_for_a_card_are_taken_where_everything_is_as_it_was(folder: Path, card: SimpleNamespace) -> None:
    """A driver may be newer, or not tell."""
    assert opened(folder).workspace_bytes == 7 + 60 - 50
    for card.driver in ((13, 0), None):
        opened(folder)


def test_another_plugin_is_refused_by_name_and_version(folder: Path, card: SimpleNamespace) -> None:
    card.plugins[12] = "0.10.3"
    assert "plugin is jax-cuda12-pjrt 0.10.2 in the programs, jax-cuda12-pjrt 0.10.3 here; compile again: " in refused(folder)
    card.plugins = {12: "0.10.2", 13: "0.10.2"}
    card.device.client.platform_version = "PJRT C API\ncuda 13000"
    assert "jax-cuda13-pjrt 0.10.2 here" in refused(folder)


def test_a_driver_that_is_too_old_is_refused(folder: Path, card: SimpleNamespace) -> None:
    card.driver = (11, 8)
    assert "the driver serves CUDA 11.8, they need CUDA 12: update the driver" in refused(folder)


def test_other_tuned_sizes_are_refused_by_their_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where only the day or the way they were chosen is another."""
    sizes = json.loads((tuned.FOLDER / "rtx4090.json").read_text())
    op, keys = next(iter(sizes.items()))
    entry = next(iter(keys.values()))
    monkeypatch.setattr(tuned, "entries", lambda name: sizes)
    entry |= {"date": "2030-01-01", "by": "measured"}
    opened(folder)
    entry["config"] = entry["config"] | {"stages": 99}
    assert f"tuned.{op} is " in (said := refused(folder)) and "code is" not in said


def test_another_card_is_refused(folder: Path, card: SimpleNamespace) -> None:
    card.device.device_kind = "NVIDIA H200"
    assert "target is rtx4090 in the programs, h200 here" in refused(folder / "rtx4090")
    card.device.device_kind = "GeForce 256"
    assert "no programs can be compiled for 'GeForce 256'; known targets: " in refused(folder)


def test_a_manifest_of_an_older_format_says_so_and_no_more(folder: Path) -> None:
    file = folder / "rtx4090" / MANIFEST
    file.write_text(json.dumps({"format": 1, "configuration": "ab" * 32}))
    assert f"{file}: format is 1 in the programs, {executables.FORMAT} here; compile again: " in refused(folder)


def test_instructions_are_those_that_xla_was_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = "flags\t\t: fpu sse4_2 avx avx2 fma avx512f avx512_vnni amx_tile md_clear\n"
    monkeypatch.setattr(Path, "read_text", lambda self, *arguments: told)
    monkeypatch.setenv("XLA_FLAGS", "")
    assert provenance.instructions() == ["amx_tile", "avx", "avx2", "avx512_vnni", "avx512f", "fma", "sse4_2"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    assert provenance.instructions() == ["avx", "avx2", "fma", "sse4_2"]
