"""Programs whose rounds call the CPU's own kernels: compiled in one process, loaded in others that compile nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import FUNCTIONAL

from ninfer_jax import Engine, EngineConfig
from ninfer_jax.programs.executables import MANIFEST

pytestmark = pytest.mark.engine

PROMPT = [5, 900, 33, 17, 256, 80, 2] * 3
SHAPES = dict(context=256, prefill_chunk=64, kv="f32", slots=2, draft=1, kernels="cpu")
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPES.items()]
# XLA's, of the process that compiles: those of this one, and those that make less of its CPU. They may be the same.
FLAGS = {"native": os.environ.get("XLA_FLAGS", ""), "avx2": "--xla_cpu_max_isa=AVX2"}


def command(flags: str, *arguments: str) -> str:
    environment = FUNCTIONAL | {"XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-m", "ninfer_jax.cli.main", *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=FLAGS)
def stored(request: pytest.FixtureRequest, micro_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """XLA's flags, and the programs that a process compiled under them."""
    out = tmp_path_factory.mktemp("programs")
    command(FLAGS[request.param], "compile", str(micro_path), "--target", "cpu", "--out", str(out), *OPTIONS)
    return FLAGS[request.param], out


@pytest.fixture(scope="module")
def answered(engine_for, micro_path: Path) -> list[int]:
    """What an engine says that compiled its programs itself."""
    engine = engine_for(micro_path, quickly=True, **SHAPES)
    return engine.generate(PROMPT, engine.default_params(temperature=0, max_new_tokens=24, ignore_eos=True)).tokens


def test_loaded_programs_answer_without_compiling(stored: tuple[str, Path], answered: list[int], micro_path: Path) -> None:
    """In this process, which may be of a CPU that can more than the kernels were compiled for, and in one of their own kind."""
    flags, folder = stored
    loaded = Engine.load(micro_path, EngineConfig(**SHAPES), programs=folder)
    answer = loaded.generate(PROMPT, loaded.default_params(temperature=0, max_new_tokens=24, ignore_eos=True))
    assert answer.tokens == answered and answer.stats.drafted > 0
    assert loaded.compilations == 0
    ids = ",".join(map(str, PROMPT))
    asked = ["--tokens", ids, "--greedy", "--max-new", "12", "--json", "--programs", str(folder), *OPTIONS]
    said = json.loads(command(flags, "generate", str(micro_path), *asked))
    assert said["tokens"] == answered[:12] and said["stats"]["compilations"] == 0


def test_a_set_holds_what_its_programs_call_and_nothing_else(stored: tuple[str, Path]) -> None:
    flags, folder = stored
    manifest = json.loads((folder / "cpu" / MANIFEST).read_text())
    called = {target for program in manifest["programs"].values() for target in program["calls"]}
    assert {file.name.removesuffix(".o") for file in (folder / "cpu").glob("*.o")} == called == set(manifest["kernels"])
    kinds = {target.split(".")[1] for target in called}
    assert {"linear", "kv_append_f32", "decode_attention_f32"} <= kinds
    assert re.fullmatch(r"[\d.]+, LLVM [\d.]+", manifest["llvmlite"])
    assert {"avx2", "fma"} <= set(manifest["needs"]["kernels"])
    assert not (flags and "avx512f" in manifest["needs"]["kernels"])


@pytest.fixture
def copy(stored: tuple[str, Path], tmp_path: Path) -> Path:
    """A copy of the programs to damage."""
    return Path(shutil.copytree(stored[1], tmp_path / "programs")) / "cpu"


def refusal(folder: Path, path: Path, **changes: object) -> str:
    with pytest.raises(ValueError) as caught:
        Engine.load(path, EngineConfig(**SHAPES | changes), programs=folder.parent)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_other_kernels_features_and_compilers_are_refused_by_name(copy: Path, micro_path: Path) -> None:
    written = json.loads((copy / MANIFEST).read_text())

    def edited(**changes: object) -> None:
        (copy / MANIFEST).write_text(json.dumps(written | changes))

    edited(needs=written["needs"] | {"kernels": ["avx2", "avx1024", "fma"]})
    assert "this processor has no avx1024, for which they were compiled; compile them on it" in refusal(copy, micro_path)
    edited(llvmlite="0.1.0, LLVM 3.5")
    assert "llvmlite is 0.1.0, LLVM 3.5 in the programs, " in refusal(copy, micro_path)
    edited()
    said = refusal(copy, micro_path, kernels="xla")
    assert "kernels is cpu in the programs, xla here" in said and "--kernels xla --out" in said


def test_damaged_and_missing_machine_code_is_not_run(copy: Path, micro_path: Path) -> None:
    """Nor is a file read whose name is no kernel's."""
    written = json.loads((copy / MANIFEST).read_text())
    target, *_ = written["kernels"]
    file = copy / f"{target}.o"
    code = bytearray(file.read_bytes())
    code[len(code) // 2] ^= 1
    file.write_bytes(code)
    assert f"{target}.o: sha256 differs from the manifest's" in refusal(copy, micro_path)
    file.unlink()
    assert f"{target}.o: No such file" in (said := refusal(copy, micro_path)) and "--kernels cpu" in said
    del written["kernels"][target]
    (copy / MANIFEST).write_text(json.dumps(written))
    assert f"damaged (KeyError: '{target}')" in refusal(copy, micro_path)
    written["programs"]["begin"]["calls"] = ["../../etc/passwd"]
    (copy / MANIFEST).write_text(json.dumps(written))
    assert "'../../etc/passwd' is no kernel's name" in refusal(copy, micro_path)
