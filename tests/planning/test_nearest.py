"""What is printed where a configuration does not fit: commands that do, each of them checked by the plan itself."""

import shlex

import pytest
from typer.testing import CliRunner

from ninfer_jax.cli.main import app
from ninfer_jax.cli.plan import OVER_BUDGET


def plan(*words: str):
    return CliRunner().invoke(app, ["plan", "qwen3_8_27b", "--target", "rtx4090", *words], prog_name="ninfer-jax")


@pytest.mark.parametrize(
    "asked",
    [
        ("--kv", "bf16", "--context", "262144"),
        ("--slots", "4", "--pool", "1048576"),
        ("--recipe", "w8"),
        ("--free", "17", "--context", "262144", "--kv", "int8"),
    ],
)
def test_every_command_that_is_printed_fits(asked):
    done = plan(*asked)
    assert done.exit_code == OVER_BUDGET
    commands = [line.split("fits: ")[1] for line in done.stderr.splitlines() if line.startswith("  fits: ")]
    assert len(set(commands)) == 3
    for command in commands:
        again = CliRunner().invoke(app, shlex.split(command)[1:])
        assert again.exit_code == 0, (command, again.output)


def test_what_fits_has_no_advice():
    done = plan("--kv", "rk4v4-e8")
    assert done.exit_code == 0 and "  fits: " not in done.stderr


def test_where_nothing_fits_larger_cards_are_named():
    done = plan("--recipe", "none", "--kv", "rk4v4-e8", "--context", "256", "--draft", "0", "--slots", "1")
    assert done.exit_code == OVER_BUDGET and "larger card" in done.stderr.replace("\n", " ")
