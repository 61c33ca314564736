"""Small checkpoints in every format, see `formats`."""

from __future__ import annotations

import pytest
from formats import draw

from ninfer_jax.config import Recipe, WeightFormat

BODY, FINE = WeightFormat(4, 64), WeightFormat(8, 32)


@pytest.fixture(scope="session")
def tensors():
    """Canonical name -> float32 array: every tensor of `formats.CONFIG`."""
    return draw()


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    formats = dict.fromkeys(("attention", "gdn", "mlp", "embed"), BODY) | dict.fromkeys(("gdn_gate", "head", "mtp"), FINE)
    return Recipe("test", formats)


@pytest.fixture
def refused():
    def check(action, *parts: object) -> str:
        """Runs `action`, which must raise ValueError with one line that holds all of `parts`."""
        with pytest.raises(ValueError) as caught:
            action()
        message = str(caught.value)
        assert len(message.splitlines()) == 1
        for part in parts:
            assert str(part) in message, message
        return message

    return check
