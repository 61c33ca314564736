"""Checkpoints and programs, made once in a test session and shared by the files of this folder."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Harness
from torch_reference import CASES, VOCAB, Reference

# How each geometry is run. Drafting, several slots and XLA's own operations must change nothing that these tests look at.
ENGINES = {
    "ratio3-8layers": dict(draft=3),
    "ratio1-4layers-tied": dict(draft=0, slots=2),
    "ratio2-4layers": dict(draft=0),
    "ratio2-8layers-tied": dict(draft=3, slots=2),
    "ratio3-4layers": dict(draft=3, kernels=None),
}

# These are compiled as for users, the others quickly: what they show is the mathematics of a geometry.
AS_FOR_USERS = ("ratio3-8layers", "ratio1-4layers-tied")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent and any(name in item.name for name in AS_FOR_USERS):
            item.add_marker("as_for_users")


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Name of a case -> the transformers model, saved in a directory of its own."""
    torch.set_num_threads(1)
    return cache(lambda name: Reference(CASES[name], tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def harness(reference):
    """Name of a case -> our model, loaded from that directory, as `ENGINES` has it or with options of the caller's own."""
    return cache(lambda name, **options: Harness(reference(name).directory, **(options or ENGINES[name])))


@pytest.fixture(scope="session")
def ids():
    """200 tokens; prefixes of them are every other sequence."""
    return np.random.default_rng(11).integers(0, VOCAB, 200)


@pytest.fixture(scope="session")
def expected(reference, ids):
    """(case, length) -> what transformers computes for the first `length` tokens."""
    return cache(lambda name, length: reference(name).forward(ids[:length]))


@pytest.fixture(scope="session")
def close():
    def check(ours, theirs, what: str, tolerance: float = 2e-5) -> None:
        """Every element within `tolerance` of the largest magnitude of `theirs`."""
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert ours.shape == theirs.shape, what
        worst = np.abs(ours - theirs).max() / np.abs(theirs).max()
        assert worst <= tolerance, f"{what}: {worst:.2e} of the largest magnitude"

    return check
