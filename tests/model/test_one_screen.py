"""The listing of docs/architecture.md, as it stands there, against the programs and against transformers."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch_reference import CASES

from ninfer_jax.checkpoints.checkpoint import canonical_name

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/architecture.md"
TOKENS = 100
PROGRAMS = "ratio3-8layers"  # run for one geometry: what they compute for the others is held to transformers as well


@pytest.fixture(scope="module")
def listing():
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    functions = {}
    exec(compile(code, str(DOCUMENT), "exec"), functions)
    return functions


@pytest.fixture(scope="module")
def weights(reference):
    def read(name):
        tensors = load_file(reference(name).directory / "model.safetensors")
        return {canonical_name(key): array.astype(np.float64) for key, array in tensors.items()}

    return read


@pytest.mark.parametrize("name", CASES)
def test_the_forward_pass_on_one_screen_is_the_models(name, listing, weights, harness, expected, ids, close):
    engine, theirs = harness(name), expected(name, TOKENS)
    hidden, logits = listing["forward"](weights(name), engine.config, ids[:TOKENS])
    close(hidden, theirs.hidden, "hidden, transformers")
    close(logits, theirs.logits, "logits, transformers")
    if name == PROGRAMS:
        ours = engine.sequence().prefill(ids[:TOKENS])
        close(ours, hidden, "hidden of the programs")
        close(engine.logits(ours), logits, "logits of the programs")


@pytest.mark.parametrize("name", CASES)
def test_the_draft_head_on_one_screen_is_the_one_built_of_transformers_modules(
    name, listing, weights, harness, reference, expected, ids, close
):
    hidden = expected(name, TOKENS).hidden
    y = listing["draft"](weights(name), harness(name).config, hidden, ids[1 : TOKENS + 1])
    close(y, reference(name).mtp(hidden, ids[1 : TOKENS + 1])[0], "hidden of the draft head")
