"""Programs that one start keeps for the next: what is used again, what is not, and what nobody may slip in."""

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import jax
import pytest
from processes import FUNCTIONAL

from ninfer_jax import Engine, EngineConfig, SamplingParams
from ninfer_jax.config import ModelConfig
from ninfer_jax.programs import kept, provenance
from ninfer_jax.programs.kept import VARIABLE, KeptPrograms, wanted
from ninfer_jax.programs.programs import Programs
from ninfer_jax.programs.setup import resolve

SHAPES = dict(context=256, prefill_chunk=64, kv="f32")
CONFIG = EngineConfig(**SHAPES)
NAME = "copy_page"  # the smallest program that computes something


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of kept programs, an empty one, in use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "auto")
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "ninfer_jax" / "programs"
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the programs that have been compiled, a stand-in of XLA's own counter that also says which."""
    names: list[str] = []
    whole = Programs.compile
    monkeypatch.setattr(Programs, "compile", lambda self, name: names.append(name) or whole(self, name))
    return names


def started(path: Path, config: EngineConfig = CONFIG) -> KeptPrograms:
    """The programs of an engine as its start has them."""
    setup = resolve(ModelConfig.from_hf(path), 1024, config, "cpu")
    return KeptPrograms(setup, setup.programs())


def files(place: Path) -> dict[str, Path]:
    """Program -> its file."""
    return {file.name.split(".")[1]: file for file in place.glob("*.bin")}


def test_the_second_engine_compiles_nothing_and_answers_alike(place: Path, micro_path: Path, compiled: list[str]) -> None:
    """In a process of its own too, which has none of the kernels that the programs call."""
    stages: list[str] = []
    params = SamplingParams(temperature=0.8, seed=5, max_new_tokens=12)
    first = Engine.load(micro_path, CONFIG, progress=lambda stage, done, total: stages.append(stage))
    answer = first.generate("ROMEO.", params)
    assert compiled == list(first.programs.eager) and [s for s in stages if ": " in s] == [f"programs: {n}" for n in compiled]
    assert set(files(place)) == set(compiled)
    assert {stat.S_IMODE(f.stat().st_mode) for f in place.iterdir()} == {0o600} and stat.S_IMODE(place.stat().st_mode) == 0o700

    compiled.clear()
    second = Engine.load(micro_path, CONFIG)
    assert second.generate("ROMEO.", params).tokens == answer.tokens and compiled == [] and second.compilations == 0
    logits = second.score([1, 2, 3])  # by a program that is not among those that serve
    assert compiled == ["head"] and "head" in files(place)
    third = Engine.load(micro_path, CONFIG)
    assert (third.score([1, 2, 3]) == logits).all() and compiled == ["head"]

    shapes = [f"--{field.replace('_', '-')}={value}" for field, value in SHAPES.items()]
    asked = ["--prompt", "ROMEO.", "--temperature", "0.8", "--seed", "5", "--max-new", "12", "--top-k", "0", "--top-p", "1"]
    environment = FUNCTIONAL | {"XDG_CACHE_HOME": str(place.parents[1]), VARIABLE: "auto"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-m", "ninfer_jax", "generate", str(micro_path), *asked, *shapes, "--json"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["stats"]["compilations"] == 0 and said["tokens"] == answer.tokens


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "another file", "a file of anybody's"])
def test_a_damaged_entry_is_compiled_again_with_a_word(
    place: Path, micro_path: Path, compiled: list[str], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    started(micro_path).take(NAME)
    file = files(place)[NAME]
    whole = file.read_bytes()
    if damage == "another file":  # whole by its digest, and no program
        kept.FILES.write(file.stem, b"\x02\0\0\0\0\0\0\0{}" + bytes(1000))
    elif damage == "a file of anybody's":
        file.chmod(0o666)
    else:
        file.write_bytes({"cut": whole[:-1], "changed": whole[:-9] + b"?" + whole[-8:], "empty": b""}[damage])
    started(micro_path).take(NAME)
    assert compiled == [NAME] * 2 and len(caplog.messages) == 1
    assert caplog.messages[0].startswith("a kept program is compiled again: ")
    assert "\n" not in caplog.messages[0]
    started(micro_path).take(NAME)
    assert compiled == [NAME] * 2 and len(caplog.messages) == 1
    assert stat.S_IMODE(files(place)[NAME].stat().st_mode) == 0o600


@pytest.mark.parametrize("which", ["programs", "ninfer_jax"])
def test_a_folder_that_others_can_write_is_refused_in_one_line(
    place: Path, micro_path: Path, compiled: list[str], caplog: pytest.LogCaptureFixture, which: str
) -> None:
    started(micro_path).take(NAME)
    folder = {"programs": place, "ninfer_jax": place.parent}[which]
    folder.chmod(0o777)
    started(micro_path).take(NAME)
    assert compiled == [NAME] * 2
    assert caplog.messages == [f"compiled programs are not kept: {folder} can be written by others: chmod go-w"]


def test_what_somebody_else_owns_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    kept.FILES.write("a", b"b")
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert kept.FILES.read("a") is None
    assert caplog.messages == [f"compiled programs are not kept: {place.parent} belongs to somebody else"]


OTHERS = {
    "shapes": lambda patch: EngineConfig(**SHAPES | {"context": 192}),
    "kernels": lambda patch: EngineConfig(**SHAPES, kernels="xla"),
    "code": lambda patch: patch.setattr(provenance, "code_digest", lambda: "other"),
    "jaxlib": lambda patch: patch.setattr(provenance.importlib.metadata, "version", lambda name: f"other {name}"),
    "instructions": lambda patch: patch.setattr(provenance, "instructions", lambda: ["avx2"]),
    "cores": lambda patch: patch.setattr(os, "sched_getaffinity", lambda pid: set(range(77))),
    "XLA's flags": lambda patch: patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=false"),
    "a setting of JAX": lambda patch: None,
}


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_decides_a_program_is_in_its_name(
    place: Path, micro_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before = started(micro_path).key
    assert started(micro_path).key == before
    other = OTHERS[what](monkeypatch)
    with jax.default_matmul_precision("bfloat16") if what == "a setting of JAX" else nullcontext():
        assert started(micro_path, other or CONFIG).key != before


def test_what_decides_nothing_is_not(place: Path, micro_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = started(micro_path).key
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("HOME", "/elsewhere")
    with jax.log_compiles():
        assert started(micro_path).key == before


def test_one_at_a_time_compiles_what_is_not_there(place: Path) -> None:
    order: list[str] = []
    waits = threading.Event()

    def second() -> None:
        with kept.FILES.alone("key", waits.set):
            order.append("second")

    other = threading.Thread(target=second)
    with kept.FILES.alone("key", pytest.fail):
        other.start()
        assert waits.wait(60)
        with kept.FILES.alone("another key", pytest.fail):
            order.append("first")
    other.join(60)
    assert order == ["first", "second"]


def test_an_entry_that_came_while_waiting_is_taken(place: Path, micro_path: Path, compiled: list[str]) -> None:
    """Of two starts at once, the one that had to wait finds what the other has made."""
    late, early = started(micro_path), started(micro_path)
    early.take(NAME)
    late.take(NAME)
    assert compiled == [NAME]


def test_the_setting_the_environment_and_jaxs_own_cache_turn_it_off(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wanted("auto") and not wanted("off")
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "off")
        assert not wanted("auto")
        patch.setenv(VARIABLE, "no")
        with pytest.raises(ValueError, match=f"^{VARIABLE} is 'no' in the environment, it must be 'auto' or 'off'$"):
            wanted("auto")
    jax.config.update("jax_compilation_cache_dir", str(place))
    assert not wanted("auto")
    with pytest.raises(ValueError, match="^program_cache is 'on', known are auto, off$"):
        EngineConfig(program_cache="on")
