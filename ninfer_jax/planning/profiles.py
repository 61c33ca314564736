"""Configurations by name: those of the package, and the user's own in one TOML file of the same form."""

from __future__ import annotations

import dataclasses
import importlib.resources
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ninfer_jax.config import RECIPES, EngineConfig, ModelConfig, Recipe
from ninfer_jax.config import recipe as recipe_called
from ninfer_jax.files import FileError, read_text
from ninfer_jax.planning.budget import Place
from ninfer_jax.planning.choose import Choice, choose

OF_ENGINE = tuple(f.name for f in dataclasses.fields(EngineConfig))
KEYS = ("about", *OF_ENGINE, "recipe", "power_watts")


@dataclass(frozen=True)
class Profile:
    """settings: fields of `EngineConfig`. recipe: a name, "auto" or "none"; None where the profile says nothing. power_watts:
    a limit of the card's power; None leaves it. file: where it was read."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    recipe: str | None = None
    power_watts: int | None = None
    file: str = ""


def user_file(environment: Mapping[str, str] = os.environ) -> Path:
    """The user's own profiles, whether they are there or not."""
    base = environment.get("XDG_CONFIG_HOME")
    return Path(base if base and Path(base).is_absolute() else Path.home() / ".config") / "ninfer_jax/profiles.toml"


def profiles(file: Path | None = None) -> dict[str, Profile]:
    """All profiles by name; those in the user's file (`user_file` by default) go before the package's. ValueError, one line with
    file and key, for one that is damaged or has keys or values that are none."""
    built_in = importlib.resources.files("ninfer_jax.planning") / "profiles.toml"
    found = _read(built_in.read_text("utf-8"), "profiles.toml of the package")
    own = user_file() if file is None else file
    return found | (_read(read_text(own), str(own)) if own.exists() else {})


def profile(name: str, file: Path | None = None) -> Profile:
    """The profile of that name; ValueError with the names that there are."""
    known = profiles(file)
    if name not in known:
        own = user_file() if file is None else file
        raise ValueError(f"profile {name!r} is unknown, known are {', '.join(known)}; your own go into {own}")
    return known[name]


def resolved(
    profile: Profile,
    model: ModelConfig,
    place: Place,
    recipe: Recipe | Literal["auto"] | None = None,
    *,
    drafts: bool = True,
    over: Mapping[str, Any] | None = None,
) -> Choice:
    """The configuration that a profile comes to for a model on a device; arguments as for `choose`. over: fields of `EngineConfig`
    that go before the profile's."""
    return choose(model, EngineConfig(**{**profile.settings, **(over or {})}), place, recipe, drafts)


def _read(text: str, file: str) -> dict[str, Profile]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"{file}: no TOML: {error}") from None
    return {name: _profile(name, table, file) for name, table in tables.items()}


def _profile(name: str, table: object, file: str) -> Profile:
    if not isinstance(table, dict):
        raise FileError(f"{file}: {name} stands outside of a profile, write [NAME] before it")
    for key in table:
        if key not in KEYS:
            raise FileError(f"{file}: [{name}] has {key!r}, known are {', '.join(KEYS)}")
    settings = {key: value for key, value in table.items() if key in OF_ENGINE}
    about, recipe, watts = table.get("about", ""), table.get("recipe"), table.get("power_watts")
    try:
        EngineConfig(**settings)
        if recipe not in (None, "auto", "none"):
            recipe_called(recipe) if isinstance(recipe, str) else _wrong("recipe", recipe, f"one of {', '.join(RECIPES)}")
        if watts is not None and (isinstance(watts, bool) or not isinstance(watts, int) or watts < 1):
            _wrong("power_watts", watts, "a whole number of watts")
        if not isinstance(about, str):
            _wrong("about", about, "a text")
    except ValueError as error:
        raise FileError(f"{file}: [{name}] {error}") from None
    return Profile(name, settings, about, recipe, watts, file)


def _wrong(key: str, value: object, wanted: str) -> None:
    raise ValueError(f"{key} is {value!r}, it must be {wanted}")
