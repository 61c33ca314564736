"""The project as it is installed: from a source archive by way of a wheel, and editable, beside folders of the user's."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from processes import FUNCTIONAL

from ninfer_jax.programs.provenance import code_digest

ROOT = Path(__file__).resolve().parent.parent
TINY = {p.name for p in (ROOT / "weights/tiny").iterdir() if p.is_file()}
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-cache-dir")
OFFLINE = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")


def run(*command: str | Path, cwd: Path) -> str:
    """stdout of a process that is not led to this checkout by its environment."""
    own = {name: value for name, value in FUNCTIONAL.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=own, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout without what is not tracked: building leaves its traces there."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "tree", ignore=LEFT_OUT)


@pytest.fixture(scope="module")
def archive(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("archive")
    build = f"import sys; from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    run(sys.executable, "-c", build, cwd=source)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(archive: Path) -> Path:
    """Built from the archive, as `pip install` of one does."""
    out = archive.parent / "wheel"
    run(sys.executable, *PIP, "wheel", *OFFLINE, "--wheel-dir", out, archive, cwd=archive.parent)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An environment of its own with the project in it; everything else comes from the environment of the tests, whose own
    editable installation is not seen: what a path of a .pth file holds is not searched for more of them."""
    where = tmp_path_factory.mktemp(request.param)
    run(sys.executable, "-m", "venv", "--without-pip", where, cwd=where)
    python = where / "bin/python"
    paths = {"base": str(where), "platbase": str(where)}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    what = [request.getfixturevalue("wheel")] if request.param == "wheel" else ["--editable", source]
    run(python, *PIP, "install", "--ignore-installed", *OFFLINE, *what, cwd=where)
    return request.param, python


def test_a_wheel_brings_two_names_and_what_they_need(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as held:
        files = held.namelist()
    top = {name.partition("/")[0] for name in files}
    assert {name for name in top if not name.endswith(".dist-info")} == {"ninfer_jax", "pallas_kernels"}
    assert {f"ninfer_jax/tiny/{name}" for name in TINY} <= set(files)
    for folder, pattern in (("targets", "*.txtpb"), ("tuned", "*.json")):
        kept = {f"pallas_kernels/{folder}/{p.name}" for p in (ROOT / "pallas_kernels" / folder).glob(pattern)}
        assert kept and kept <= set(files)
    assert {"ninfer_jax/py.typed", "pallas_kernels/py.typed"} <= set(files)
    modules = {str(p.relative_to(ROOT)) for name in ("ninfer_jax", "pallas_kernels") for p in (ROOT / name).rglob("*.py")}
    assert modules == {name for name in files if name.endswith(".py")}
    assert {name.rpartition("/")[2] for name in files} >= {"LICENSE", "NOTICE"}


def test_a_source_archive_has_the_bundled_model(archive: Path) -> None:
    with tarfile.open(archive) as held:
        names = {name.partition("/")[2] for name in held.getnames()}
    assert {f"weights/tiny/{name}" for name in TINY} <= names


# What people have beside their scripts. The last line of each would end the script.
NAMES = ("weights/__init__.py", "weights.py", "tests/__init__.py", "benchmarks/__init__.py", "examples/__init__.py")
SCRIPT = """
import ninfer_jax, pallas_kernels
from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.programs.provenance import code_digest
from ninfer_jax.programs.setup import model_of

model_of("tiny")
engine = Engine.load(tiny_path(), EngineConfig(context=64, prefill_chunk=64, draft=0))
print(ninfer_jax.__file__, pallas_kernels.__file__, tiny_path(), code_digest(), sep="\\n")
print(len(engine.generate("ROMEO.", SamplingParams(temperature=0, max_new_tokens=2)).tokens), engine.compilations)
"""


def test_a_script_beside_folders_of_common_names(installed: tuple[str, Path], source: Path, tmp_path: Path) -> None:
    """It imports and generates, and what it runs is the installation's; its folder comes first on the path of imports."""
    kind, python = installed
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise RuntimeError({name!r})\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    package, kernels, tiny, digest, generated = run(python, "script.py", cwd=tmp_path).splitlines()
    assert digest == code_digest()
    assert generated.split()[0] == "2"
    root = source if kind == "editable" else python.parent.parent
    assert all(Path(path).is_relative_to(root) for path in (package, kernels, tiny))
    assert run(python.parent / "ninfer-jax", "generate", "--help", cwd=tmp_path)
