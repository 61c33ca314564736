"""The layers, the files and the versions that an installation has to have."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ninfer_jax.checkpoints import tiny_path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
LANES = {"py311-jax0.10.2": ("3.11", "0.10.2", "0.12.8"), "py312-jax0.11.2": ("3.12", "0.11.2", "0.12.12")}
TINY_FILES = (
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "README.md",
    "LICENSE.md",
)
# Heavy or independent on purpose: the programs never need them, the tests compare with them.
NOT_IN_THE_NEWER_LANE = {"torch", "transformers"}


def imported(path: Path) -> set[str]:
    """Top-level names of everything a file imports, inside functions and `if TYPE_CHECKING` too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0] if not node.level else path.relative_to(ROOT).parts[0])
    return names


def pins(lane: str) -> dict[str, str]:
    """Canonical name -> version of a constraint file, every line of which has to be exact."""
    found = {}
    for line in (ROOT / f"constraints/{lane}.txt").read_text("utf-8").splitlines():
        if not line.startswith("#"):
            exact = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+]+)", line)
            assert exact, f"{lane}: {line!r} is not NAME==VERSION"
            name, version = exact.groups()
            assert canonicalize_name(name) not in found, f"{name} is pinned twice"
            found[canonicalize_name(name)] = version
    return found


def requirements(*extras: str) -> list[Requirement]:
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("package", ["pallas_kernels", "ninfer_jax"])
def test_everything_imported_is_a_dependency(package):
    """Of the plain installation: whatever an extra brings may be missing, and then an import must not fail. The server's room is
    entered by one command alone, which says what to install."""
    distributions = importlib.metadata.packages_distributions()
    for file in sorted((ROOT / package).rglob("*.py")):
        extras = ["server"] if file.is_relative_to(ROOT / "ninfer_jax" / "server") else []
        allowed = {canonicalize_name(r.name) for r in requirements(*extras)} | {"ninfer-jax"}
        for name in imported(file) - set(sys.stdlib_module_names) - {"pallas_kernels", "ninfer_jax"}:
            provided_by = {canonicalize_name(d) for d in distributions.get(name, [name])}
            assert provided_by & allowed, f"{file.relative_to(ROOT)} imports {name}"


def test_the_bundled_model_is_package_data(tmp_path):
    """What setuptools copies into a wheel, not what lies in the checkout."""
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    assert sorted(p.name for p in (tmp_path / "lib").iterdir()) == ["ninfer_jax", "pallas_kernels"]
    for name in TINY_FILES:
        assert (tmp_path / "lib/ninfer_jax/tiny" / name).is_file(), name
    for file in (ROOT / "ninfer_jax/server/page").iterdir():
        assert (tmp_path / "lib/ninfer_jax/server/page" / file.name).is_file(), file.name
    for name in ("profiles.toml", "recorded.json"):
        assert (tmp_path / "lib/ninfer_jax/planning" / name).is_file(), name
    for package in ("ninfer_jax", "pallas_kernels"):
        assert (tmp_path / "lib" / package / "py.typed").is_file(), f"{package} installs without its types"


def test_the_bundled_model_is_found_where_it_is_installed():
    for name in TINY_FILES:
        assert (tiny_path() / name).is_file(), name


def test_console_script_resolves():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="ninfer-jax")
    assert callable(script.load())


def test_extras():
    assert set(PROJECT["optional-dependencies"]) == {
        "cuda12",
        "cuda13",
        "aot",
        "triton",
        "server",
        "nvml",
        "test-kernels",
        "test-cards",
        "test",
        "lint",
        "bench",
        "train",
    }
    assert [str(r.specifier) for r in requirements("test") if r.name == "torch"] == ["==2.13.0"]
    assert not NOT_IN_THE_NEWER_LANE & {r.name for r in requirements("test-kernels")}


@pytest.mark.parametrize("lane", LANES)
def test_a_lane_pins_its_versions_and_all_that_the_project_asks_for(lane):
    pinned = pins(lane)
    _, jax, flax = LANES[lane]
    assert (pinned["jax"], pinned["jaxlib"], pinned["flax"], pinned["torch"]) == (jax, jax, flax, "2.13.0")
    for requirement in requirements(*PROJECT["optional-dependencies"]):
        if requirement.name != PROJECT["name"]:
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"


def test_the_lane_of_this_python_pins_whatever_is_installed_for_the_project():
    """The closure of what the installed packages say they need, against the constraint file."""
    lane = "py311-jax0.10.2" if sys.version_info < (3, 12) else "py312-jax0.11.2"
    pinned, todo, seen = pins(lane), [("ninfer-jax", "")], set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        assert name == "ninfer-jax" or name in pinned, f"{name} is needed but not pinned in constraints/{lane}.txt"
        for line in importlib.metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(needed.name), e) for e in {"", *needed.extras}]
    assert len(seen) > 20


def newer_lane() -> tuple[list[str], list[str]]:
    """The paths and the ignored files of `make test-lane312`."""
    text = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    words = [re.search(rf"^{name} := (.*)$", text, re.MULTILINE)[1].split() for name in ("LANE312_TESTS", "LANE312_WITHOUT")]
    return words[0], words[1]


def test_the_newer_lane_runs_all_that_it_can_and_nothing_that_needs_torch():
    paths, without = newer_lane()
    for path in without:
        assert imported(ROOT / path) & NOT_IN_THE_NEWER_LANE, f"{path} would run in the newer lane: take it off LANE312_WITHOUT"
    for path in paths:
        assert (ROOT / path).exists(), f"{path} of LANE312_TESTS does not exist"
        files = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("*.py"))
        for file in files:
            name = str(file.relative_to(ROOT))
            needs = sorted(imported(file) & NOT_IN_THE_NEWER_LANE)
            assert name in without or not needs, f"{name} imports {needs}: add it to LANE312_WITHOUT in the Makefile"
