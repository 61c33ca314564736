"""The order of imports that docs/architecture.md gives, doors that stay shut (private names, Pallas' GPU backend), and how
docstrings begin."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ninfer_jax", "pallas_kernels")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
PUBLIC = {"_replace", "_fields", "_asdict", "_make", "_exit"}  # documented by Python: of named tuples, and `os._exit`


def documented_order() -> dict[str, int]:
    """Room of ninfer_jax -> its floor, from the one line of docs/architecture.md that has the order."""
    (line,) = re.findall(r"^    (files < .*)$", (ROOT / "docs/architecture.md").read_text("utf-8"), re.MULTILINE)
    return {room.strip(): floor for floor, rooms in enumerate(line.split("<")) for room in rooms.split(",")}


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and full name of every module imported, inside functions and `if TYPE_CHECKING` too; `package`: where relative
    imports start."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "ninfer_jax").parts[0].removesuffix(".py")


def test_every_room_has_its_place_in_the_documented_order():
    rooms = {room_of(path) for path in FILES if path.is_relative_to(ROOT / "ninfer_jax")}
    # The two that gather what a user sees stand above all others.
    assert rooms - {"__init__", "__main__"} == set(documented_order())


def test_rooms_import_only_what_lies_below_them():
    order, upwards = documented_order(), []
    for path in FILES:
        if not path.is_relative_to(ROOT / "ninfer_jax") or room_of(path).startswith("__"):
            continue
        for line, name in imported_modules(ast.parse(path.read_text("utf-8")), package_of(path)):
            parts = name.split(".")
            # The package itself has its version, and the names of a user, which nothing inside may take.
            if parts[0] != "ninfer_jax" or parts[1] in (room_of(path), "__version__"):
                continue
            if parts[1] not in order or order[parts[1]] >= order[room_of(path)]:
                upwards.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not upwards


def test_kernels_know_nothing_of_the_engine():
    names = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in FILES
        if path.is_relative_to(ROOT / "pallas_kernels")
        for line, name in imported_modules(ast.parse(path.read_text("utf-8")), package_of(path))
        if name.split(".")[0] == "ninfer_jax"
    ]
    assert not names


def private_uses(path: Path) -> list[str]:
    """Names that begin with an underscore and are another module's: attributes that nothing in this file defines, and
    imports."""
    tree = ast.parse(path.read_text("utf-8"))
    own = {"self", "cls"}
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id in own
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr) and node.attr not in PUBLIC | defined:
            if isinstance(node.value, ast.Name) and node.value.id in own:
                continue  # a base class's, which this one shares
            found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom):
            private = [alias.name for alias in node.names if re.match(r"_(?!_)", alias.name)]
            private += [part for part in (node.module or "").split(".") if re.match(r"_(?!_)", part) and part != "__future__"]
            found += [f"{path.relative_to(ROOT)}:{node.lineno} imports {name}" for name in private]
    return found


# What has no public door: of transformers, the attention that a model was given.
FOREIGN = {"_attn_implementation"}


def test_no_module_uses_private_names_of_another():
    others = [path for folder in ("benchmarks", "examples", "weights") for path in sorted((ROOT / folder).rglob("*.py"))]
    uses = [use for path in (*FILES, *others) for use in private_uses(path)]
    assert [use for use in uses if use.rpartition(".")[2] not in FOREIGN] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_one_module_alone_imports_the_gpu_backend_of_pallas(package):
    """A port to another backend is that file and the kernels' bodies."""
    backends = re.compile(r"jax\.experimental\.pallas\.(?!(core|utils|BlockSpec|program_id|ds)$)\w+|jax\._src\.pallas")
    users = {
        str(path.relative_to(ROOT))
        for path in FILES
        if path.is_relative_to(ROOT / package)
        for _, name in imported_modules(ast.parse(path.read_text("utf-8")), package_of(path))
        if backends.match(name)
    }
    assert users == ({"pallas_kernels/launch.py"} if package == "pallas_kernels" else set())


def test_docstrings_begin_with_their_result():
    """With a noun or a verb that names it, not with a word that hangs in the air."""
    hanging = {"As", "How", "It", "Of", "These", "What", "Where", "Which", "Who", "Whoever"}
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or "-"
                if text.split()[0] in hanging:
                    found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not found
