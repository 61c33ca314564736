"""Programs compiled in one process and run in another, and everything that must stop them from being loaded."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from processes import FUNCTIONAL
from typer.testing import CliRunner

from ninfer_jax import Engine, EngineConfig
from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.cli.main import app
from ninfer_jax.programs import provenance
from ninfer_jax.programs.executables import MANIFEST, StoredPrograms
from ninfer_jax.programs.plan import resident_bytes
from ninfer_jax.programs.setup import model_of, resolve

pytestmark = pytest.mark.engine
SHAPES = ["--context", "256", "--draft", "1", "--prefill-chunk", "64", "--kv", "f32", "--kernels", "xla"]
CONFIG = EngineConfig(context=256, draft=1, prefill_chunk=64, kv="f32", kernels="xla")


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = FUNCTIONAL | environment
    return subprocess.run(
        [sys.executable, "-m", "ninfer_jax.cli.main", *arguments], capture_output=True, text=True, env=environment
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment for a compilation cache of JAX."""
    folder = tmp_path_factory.mktemp("cache")
    return {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


ASKED = ("--prompt", "ROMEO.", "--temperature", "0.8", "--seed", "5", "--max-new", "30", "--json")


@pytest.fixture(scope="module")
def answered(cache: dict[str, str]) -> dict:
    """What an engine that compiles answers; it fills the cache."""
    done = command("generate", "tiny", *ASKED, *SHAPES, **cache)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled(answered: dict, cache: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside a compilation cache of JAX that has these very programs: what it holds must not end up in the files."""
    out = tmp_path_factory.mktemp("programs")
    assert list(Path(cache["JAX_COMPILATION_CACHE_DIR"]).iterdir())
    done = command(
        "compile", str(tiny_path()), "--target", "cpu", "--out", str(out), "--report", str(out / "report.json"), *SHAPES, **cache
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def copy(compiled: Path, tmp_path: Path) -> Path:
    """A copy of the programs to damage."""
    folder = tmp_path / "cpu"
    folder.mkdir()
    for file in (compiled / "cpu").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_loaded_programs_answer_without_compiling(compiled: Path, answered: dict) -> None:
    """The same tokens as an engine that compiled; the counter of compilations stays at zero, here and in a process of its own."""
    loaded = Engine.load(tiny_path(), CONFIG, programs=compiled)
    params = loaded.default_params(temperature=0.8, seed=5, max_new_tokens=30, logprobs=2)
    assert loaded.generate("ROMEO.", params).tokens == answered["tokens"] and len(answered["tokens"]) > 5
    assert loaded.compilations == 0 and answered["stats"]["compilations"] >= 6  # the counter counts
    done = command("generate", "tiny", *ASKED, "--programs", str(compiled), *SHAPES)
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["tokens"] == answered["tokens"] and again["stats"]["compilations"] == 0


def test_what_is_open_is_as_the_programs_were_compiled(compiled: Path, answered: dict) -> None:
    """The whole configuration from their manifest, told in the one line; what is set is not taken from there."""
    done = command("generate", "tiny", *ASKED, "--programs", str(compiled))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == answered["tokens"] and found["stats"]["compilations"] == 0
    fields = {"context": 256, "kv": "f32", "draft": 1, "slots": 1, "pool": 256, "prefill_chunk": 64, "dtype": "float32"}
    assert {name: found["configuration"][name] for name in fields} == fields
    told = "auto: context 256, kv f32, draft 1, slots 1, pool 256, prefill_chunk 64 (as the programs in"
    assert told in done.stderr and f"{compiled} were compiled" in found["why"]
    assert f"{MANIFEST}: draft is 1 in the programs, 2 here; compile again" in refusal(compiled, EngineConfig(draft=2))


def test_the_report_says_what_the_compiler_said(compiled: Path) -> None:
    report = json.loads((compiled / "report.json").read_text())["cpu"]
    moving = {"snapshot", "restore", "read_page", "write_page", "copy_page"}
    assert set(report["programs"]) == {"allocate", "admit", "release", "constrain", "prefill", "begin", "decode_round"} | moving
    for program in report["programs"].values():
        assert program["bytes"] > 0 and program["compile_s"] > 0 and program["argument_bytes"] >= program["aliased_bytes"] >= 0


def refusal(folder: Path, config: EngineConfig = CONFIG) -> str:
    with pytest.raises(ValueError) as caught:
        Engine.load(tiny_path(), config, programs=folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edited(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize("field", ["jaxlib", "jax", "target", "format", "code", "processor", "configuration", "programs", "needs"])
def test_another_field_in_the_manifest_is_refused_by_name(copy: Path, field: str) -> None:
    edited(copy, **{field: "other"})
    said = refusal(copy)
    damaged = {"configuration": "context is absent in the programs, 256 here", "programs": "damaged", "needs": "damaged"}
    assert damaged.get(field, f"{field} is other in the programs, ") in said
    assert said.endswith(f"compile again: {COMMAND} --out {copy.parent}")


COMMAND = (
    "ninfer-jax compile MODEL --target cpu --context 256 --slots 1 --pool 256 --draft 1 --drafter mtp --kv f32 --prefill-chunk 64"
    " --dtype float32 --kernels xla"
)


def test_another_configuration_is_refused_with_the_fields_that_differ(compiled: Path) -> None:
    """And with nothing else: neither a digest nor what is the same."""
    said = refusal(compiled, replace(CONFIG, draft=3))
    assert f"{MANIFEST}: draft is 1 in the programs, 3 here; compile again: ninfer-jax compile MODEL --target cpu" in said
    said = refusal(compiled, replace(CONFIG, context=512, pool=512, prefill_chunk=512))
    fields = {"context": 256, "pool": 256, "prefill_chunk": 64}
    facts = ", ".join(f"{field} is {then} in the programs, 512 here" for field, then in fields.items())
    assert f"{MANIFEST}: {facts}; compile again" in said and "--prefill-chunk 512" in said


def test_programs_of_another_code_with_the_same_shapes_are_refused(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "code_digest", lambda: "0123456789abcdef")
    assert "code is " in (said := refusal(compiled)) and "in the programs, 0123456789abcdef here; compile again" in said


def test_a_processor_without_the_instructions_is_refused(copy: Path) -> None:
    edited(copy, needs={"instructions": [*provenance.instructions(), "avx1024"]})
    assert "this processor has no avx1024" in refusal(copy)


def test_what_has_been_checked_is_what_the_memory_check_takes(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace that the compiler told when they were compiled: a loaded executable may not tell any more."""
    setup = resolve(*model_of("tiny"), CONFIG, "cpu")
    workspace = StoredPrograms.open(compiled, setup, setup.programs()).workspace_bytes
    listed = json.loads((compiled / "cpu" / MANIFEST).read_text())["programs"]
    del listed["allocate"]  # runs once, before
    assert workspace == max(p["temporary_bytes"] + p["output_bytes"] - p["aliased_bytes"] for p in listed.values())
    free = resident_bytes(setup.programs()) + workspace - 1
    monkeypatch.setattr(sys.modules[Engine.__module__], "free_bytes", lambda device: free)
    assert f"{free + 1:,} bytes are needed" in refusal(compiled)


def test_a_changed_file_is_not_unpickled(copy: Path) -> None:
    """A payload that would leave a mark if it were."""
    mark = copy / "mark"
    (copy / "prefill.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
    assert "prefill.bin" in (message := refusal(copy)) and "sha256" in message
    assert not mark.exists()


def test_missing_pieces(copy: Path, tmp_path: Path) -> None:
    (copy / "begin.bin").unlink()
    assert "begin.bin" in refusal(copy)
    manifest = json.loads((copy / MANIFEST).read_text())
    del manifest["programs"]["begin"]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    assert "program begin is missing" in refusal(copy)
    (copy / MANIFEST).write_text("{")
    assert "not JSON" in refusal(copy)
    (tmp_path / "empty").mkdir()
    assert "No such file" in refusal(tmp_path / "empty")


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "thesis.tex").write_text("years")
    done = CliRunner().invoke(app, ["compile", str(tiny_path()), "--target", "cpu", "--out", str(tmp_path), *SHAPES])
    assert done.exit_code == 1 and "something else" in done.stderr
    assert (tmp_path / "cpu" / "thesis.tex").read_text() == "years"
