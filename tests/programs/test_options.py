"""One table of XLA's options: what compiles on a card and what compiles for one elsewhere."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from ninfer_jax.config import EngineConfig
from ninfer_jax.programs import Programs, card
from ninfer_jax.programs.catalogue import CATALOGUE
from ninfer_jax.programs.setup import model_of, resolve
from pallas_kernels import deviceless, launch


class Lowered:
    """Takes the options down."""

    def __init__(self, asked: list[dict | None]):
        self._asked = asked

    def compile(self, compiler_options: dict | None = None) -> SimpleNamespace:
        self._asked.append(compiler_options)
        return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**dict.fromkeys(SIZES, 0)))


SIZES = [f"{part}_size_in_bytes" for part in ("argument", "output", "alias", "temp")]


@pytest.mark.parametrize("name", [program.name for program in CATALOGUE])
def test_a_card_compiles_as_what_is_compiled_for_it_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Engine.load` on a GPU against `compile`, `plan` and `make check-27b`, which all go through `compile_program`: the options,
    but where the second dumps to, and how the function is lowered."""
    programs = resolve(*model_of("tiny"), EngineConfig(context=64, draft=1), "cuda").programs()
    asked: list = []
    ways: list[dict] = []

    def jit(function: object, **how: object) -> SimpleNamespace:
        ways.append({k: tuple(v) if k == "donate_argnums" else v for k, v in how.items()})
        return SimpleNamespace(lower=lambda *arguments: Lowered(asked))

    monkeypatch.setattr("jax.jit", jit)
    monkeypatch.setattr(deviceless, "_mesh", lambda target: SimpleNamespace(abstract_mesh=None))
    monkeypatch.setattr(deviceless, "NamedSharding", lambda *arguments: None)
    monkeypatch.setattr(deviceless, "_abstract_mesh", lambda target: None)
    programs.compiled(name)
    card.compile_program(name, programs.source(name), "rtx4090")
    here, elsewhere = asked
    elsewhere = {option: value for option, value in elsewhere.items() if not option.startswith("xla_dump")}
    assert here == elsewhere == dict(launch.COMPILER_OPTIONS) != {}
    assert ways[0] == ways[1]


def test_on_a_cpu_nothing_has_options() -> None:
    programs: Programs = resolve(*model_of("tiny"), EngineConfig(context=64, draft=0), "cpu").programs()
    names = [program.name for program in CATALOGUE]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        asked: list = []
        patch.setattr(Programs, "lowered", lambda self, name: Lowered(asked))
        for name in names:
            programs.compiled(name)
    assert asked == [None] * len(names)
