"""Mistakes in the command line itself: one line on stderr, nothing on stdout, exit code 2."""

import pytest
from typer.testing import CliRunner

from ninfer_jax.cli.main import app


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
    ],
)
def test_a_mistake_is_one_line_that_names_it(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, arguments, prog_name="ninfer-jax")
    assert done.exit_code == 2 and not done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert named in done.stderr and "--help`" in done.stderr


def test_help_and_no_arguments_are_not_mistakes() -> None:
    told = CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "200"})
    assert told.exit_code == 0 and "SRC" in told.stdout and not told.stderr
    bare = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert "convert" in bare.output and "error" not in bare.output
