"""The command line itself: mistakes on one line with exit code 2, other endings with theirs, help from the tables."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ninfer_jax
from ninfer_jax.cli import common, main
from ninfer_jax.cli.main import app
from ninfer_jax.config import PRESETS, RECIPES
from pallas_kernels.kv_codecs import FORMATS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "tiny", "--max-new", "many"], "'--max-new'"),
        (["generate"], "argument 'model'"),
        (["generat", "tiny"], "'generat'"),
        (["generate", "tiny", "--nope"], "--nope"),
        (["eval", "tiny", "beauty"], "'beauty'"),
        (["plan", "tiny", "--slots"], "--slots"),
        (["convert", "only-a-source"], "DST"),
        (["generate", "tiny", "--messages", ""], "'--messages': the path is empty"),
        (["generate", "tiny", "--prompt", "x", "--programs", ""], "'--programs': the path is empty"),
        (["compile", "tiny", "--out", ""], "'--out': the path is empty"),
        (["compile", "tiny", "--out", "x", "--report", ""], "'--report': the path is empty"),
        (["convert", "tiny", "x", "--draft-text", ""], "'--draft-text': the path is empty"),
        (["convert", "tiny", "x", "--mtp", ""], "'--mtp': the path is empty"),
        *(
            (["bench", "tiny", f"--{name}", ""], f"'--{name}': the path is")
            for name in ("corpus", "json", "csv", "plot", "compare")
        ),
        *(
            (["eval", "tiny", "ppl", "--text", "x", f"--{name}", ""], f"'--{name}': the path is")
            for name in ("text", "json", "plot")
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_it(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, arguments, prog_name="ninfer-jax")
    assert done.exit_code == 2 and not done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert named in done.stderr and "--help`" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "tiny", "--prompt", "x"],
        ["bench", "tiny"],
        ["eval", "tiny", "ppl", "--text", __file__],
        ["plan", "tiny", "--target", "cpu"],
        ["compile", "tiny", "--target", "cpu", "--out", "nowhere"],
    ],
)
def test_kernels_that_do_not_exist_are_refused_with_those_that_do(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, [*arguments, "--kernels", "llvm"])
    assert done.exit_code == 1 and not done.stdout
    assert done.stderr == "error: kernels is 'llvm', known are auto, cpu, xla\n"


def test_help_and_no_arguments_are_not_mistakes() -> None:
    told = CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "200"})
    assert told.exit_code == 0 and "SRC" in told.stdout and not told.stderr
    bare = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert "convert" in bare.output and "error" not in bare.output


def run(*arguments: str, code: str | None = None, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-c", code) if code else ("-m", "ninfer_jax", *arguments))]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False, **options)


def test_the_version_needs_no_jax():
    """From the package, from `python -m`, and from the console script's function."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert ninfer_jax.__version__ == version
    done = run("--version")
    assert (done.stdout, done.stderr, done.returncode) == (f"ninfer-jax {version}\n", "", 0)
    code = f"""
import sys, ninfer_jax
from ninfer_jax.cli.main import app
assert ninfer_jax.__version__ == {version!r} and "Engine" in dir(ninfer_jax) and not hasattr(ninfer_jax, "Motor")
for arguments in (
    ["--version"], ["--help"], ["generate", "--help"], ["compile", "--help"], ["generate", "nowhere", "--prompt", "x"],
    ["generate", "tiny", "--messages", "nowhere"], ["bench", "nowhere"], ["convert", "nowhere", "x"],
):
    try:
        app(arguments)
    except SystemExit as end:
        print("exit", end.code)
heavy = sorted({{"jax", "jaxlib", "numpy", "flax", "tokenizers"}} & sys.modules.keys())
assert not heavy, heavy
from ninfer_jax import Engine, EngineConfig, SamplingParams
assert {{"jax", "numpy"}} <= sys.modules.keys() and Engine.__name__ == "Engine"
"""
    done = run(code=code)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("exit")] == ["exit 0"] * 4 + ["exit 1"] * 4


def test_help_has_what_the_tables_have():
    for command in ("generate", "plan", "compile", "bench run", "eval"):
        told = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "250"}).stdout
        assert ", ".join(FORMATS) in told, command
        if command in ("plan", "compile"):
            assert ", ".join(RECIPES) in told and ", ".join(PRESETS) in told
    assert ", ".join(RECIPES) in CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "250"}).stdout


@pytest.mark.parametrize("command", ["generate", "convert", "plan", "compile", "bench", "eval"])
def test_an_interrupt_ends_every_command_with_130(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for module, names in (
        ("generate", ("checked",)),
        ("convert", ("source_of",)),
        ("plan", ("known_of",)),
        ("bench", ("checked",)),
        ("evaluate", ("checked",)),
    ):
        for name in names:
            monkeypatch.setattr(f"ninfer_jax.cli.{module}.{name}", interrupted)
    arguments = {
        "generate": ["tiny", "--prompt", "x"],
        "convert": ["tiny", str(tmp_path / "x")],
        "plan": ["tiny", "--target", "cpu"],
        "compile": ["tiny", "--target", "cpu", "--out", str(tmp_path / "x")],
        "bench": ["tiny"],
        "eval": ["tiny", "ppl", "--text", __file__],
    }
    done = CliRunner().invoke(app, [command, *arguments[command]])
    assert done.exit_code == 130 and not done.stdout and "Traceback" not in done.stderr
    assert done.stderr.strip() == ("interrupted; the same command goes on from here" if command == "convert" else "")


def test_an_interrupt_before_a_command_deals_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(common, "stderr_console", interrupted)
    done = CliRunner().invoke(app, ["generate", "tiny", "--prompt", "x"])
    assert done.exit_code == 130 and not done.output.strip()


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    code = """
import os, sys
from ninfer_jax.cli.common import one_line_errors, stderr_console
reader, writer = os.pipe()
os.dup2(writer, sys.stdout.fileno())
os.close(reader)
os.close(writer)
import typer
try:
    with one_line_errors(stderr_console()):
        print("x" * 100_000, flush=True)
except typer.Exit as end:
    sys.exit(end.exit_code)
"""
    done = run(code=code)
    assert (done.returncode, done.stderr) == (1, "")


def test_errors_stay_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    for error, line in (
        (ValueError("a\nb\x1b[0m"), "error: a\\nb\\x1b[0m"),
        (OSError(2, "Gone", "a\nb"), "error: [Errno 2] Gone: 'a\\nb'"),
    ):
        with pytest.raises(typer.Exit) as end, common.one_line_errors(common.stderr_console()):
            raise error
        assert end.value.exit_code == 1 and capsys.readouterr().err == line + "\n"
    with pytest.raises(RuntimeError), common.one_line_errors(common.stderr_console()):
        raise RuntimeError("a fault of the program")
    assert main.app is app
