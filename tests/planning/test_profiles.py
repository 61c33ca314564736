"""Profiles: those of the package, the user's own, what goes before what, and mistakes in the file."""

import pytest
from typer.testing import CliRunner

from ninfer_jax.cli.main import app
from ninfer_jax.config import preset
from ninfer_jax.planning.budget import card
from ninfer_jax.planning.profiles import profile, profiles, resolved, user_file

BIG = preset("qwen3_8_27b")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes the user's file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "ninfer_jax" / "profiles.toml"
    file.parent.mkdir()

    def write(text: str):
        file.write_text(text)
        return file

    return write


def test_the_packages_own_fit_the_27b_on_a_4090(own):
    assert {"full", "team"} <= set(profiles())
    full, team = (resolved(profile(name), BIG, card("rtx4090"), "auto") for name in ("full", "team"))
    assert full.fits and (full.config.slots, full.config.context, full.config.kv) == (1, 262_144, "rk4v4-e8")
    assert team.fits and team.config.slots == 4 and team.config.pool > 262_144


def test_the_users_own_go_first_and_say_where_they_are(own):
    file = own('[quiet]\nabout = "reading"\ncontext = 65536\nkv = "int8"\npower_watts = 250\n[full]\nslots = 2\n')
    assert user_file() == file
    quiet = profile("quiet")
    assert quiet.settings == {"context": 65536, "kv": "int8"} and quiet.power_watts == 250 and quiet.file == str(file)
    assert profile("full").settings == {"slots": 2} and profile("team").settings == {"slots": 4}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[a]\ncontexts = 5\n", "[a] has 'contexts', known are about, context"),
        ("[a]\nkv = 'f33'\n", "[a] kv"),
        ("[a]\nslots = 9\n", "[a] slots is 9"),
        ("[a]\nrecipe = 'q5'\n", "[a] "),
        ("[a]\nrecipe = 5\n", "[a] recipe is 5"),
        ("[a]\npower_watts = true\n", "[a] power_watts is True"),
        ("[a]\npower_watts = 0\n", "[a] power_watts is 0"),
        ("[a]\nabout = 5\n", "[a] about is 5"),
        ("context = 5\n", "context stands outside of a profile"),
        ("[a\n", "no TOML"),
    ],
)
def test_mistakes_are_one_line_with_file_profile_and_key(own, text, says):
    file = own(text)
    with pytest.raises(ValueError, match=r"\A.{1,400}\Z") as caught:
        profiles()
    assert str(file) in str(caught.value) and says in str(caught.value)


def test_an_unknown_name_has_those_that_there_are(own):
    file = own("[quiet]\nslots = 1\n")
    with pytest.raises(ValueError) as caught:
        profile("quite")
    assert "'quite' is unknown, known are full, team, quiet" in str(caught.value) and str(file) in str(caught.value)


def test_what_is_typed_goes_before_a_profile(own):
    own('[small]\ncontext = 4096\nkv = "int8"\nslots = 2\n')

    def planned(*more: str) -> str:
        done = CliRunner().invoke(app, ["plan", "qwen3_8_27b", "--target", "rtx4090", "--profile", "small", *more])
        assert done.exit_code == 0, done.output
        return done.stdout.splitlines()[0]

    assert "context 4,096, kv int8" in planned() and "slots 2" in planned()
    assert "context 8,192, kv int8" in planned("--context", "8192")
    done = CliRunner().invoke(app, ["plan", "qwen3_8_27b", "--target", "rtx4090", "--profile", "smal"])
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and "smal" in done.stderr
