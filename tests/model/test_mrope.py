"""Positions that differ on the three axes, as images have them: the angles themselves, prefill, and decoding after an image."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_reference import CASES, Case
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding, apply_rotary_pos_emb

from ninfer_jax.config import ModelConfig
from ninfer_jax.model.rope import rotary
from pallas_kernels.kv_append.reference import apply_rotary

NAME = "ratio2-8layers-tied"


def image_positions(before, rows, columns, after):
    """Text, one image of rows x columns tokens, text: `[3, tokens]`, and how far the last position trails the token's index."""
    time, height, width = [np.arange(before)] * 3
    grid = np.indices((rows, columns)).reshape(2, -1)
    time = np.concatenate([time, np.full(rows * columns, before)])
    height, width = (np.concatenate([axis, before + g]) for axis, g in zip((height, width), grid, strict=True))
    start = before + max(rows, columns)
    positions = np.stack([np.concatenate([axis, start + np.arange(after)]) for axis in (time, height, width)])
    return positions, int(positions[0, -1]) - (positions.shape[1] - 1)


@pytest.mark.parametrize("section, factor", [([3, 3, 2], 0.25), ([11, 11, 10], 1.0), ([6, 1, 1], 0.25), ([2, 6, 8], 0.5)])
def test_angles_and_rotation(section, factor, close):
    text = Case(ratio=1, layers=4, tied=True).text_config() | {"partial_rotary_factor": factor}
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": section, "partial_rotary_factor": factor}
    config = ModelConfig.from_hf(text | {"model_type": "qwen3_5_text"})
    random = np.random.default_rng(0)
    positions = random.integers(0, 5000, (3, 50)).astype(np.int32)
    q = random.standard_normal((50, 4, 64)).astype(np.float32)
    k = random.standard_normal((50, 2, 64)).astype(np.float32)

    cos, sin = rotary(jnp.asarray(positions), config, jnp.float32)
    embedding = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(**text))
    their_cos, their_sin = embedding(torch.zeros(1), torch.as_tensor(positions)[:, None])
    their_q, their_k = apply_rotary_pos_emb(
        torch.as_tensor(q)[None], torch.as_tensor(k)[None], their_cos, their_sin, unsqueeze_dim=2
    )

    half = cos.shape[1]
    # Angles reach 5000, where one float32 step is 5e-4.
    close(cos, their_cos[0, :, :half], "cos", 1e-3)
    close(sin, their_sin[0, :, :half], "sin", 1e-3)
    close(apply_rotary(jnp.asarray(q), cos, sin), their_q[0], "q", 1e-3)
    close(apply_rotary(jnp.asarray(k), cos, sin), their_k[0], "k", 1e-3)


@pytest.mark.parametrize("cut", [None, 65])
def test_prefill_and_decode_around_an_image(cut, harness, reference, ids, close):
    positions, delta = image_positions(before=20, rows=6, columns=9, after=60)
    length = positions.shape[1] - 5
    theirs = reference(NAME).forward(ids[: length + 5], positions)
    plain = reference(NAME).forward(ids[: length + 5])
    assert np.abs(theirs.hidden - plain.hidden).max() > 0.1, "the positions make no difference here, so the test shows nothing"

    sequence = harness(NAME).sequence()
    hidden = sequence.prefill(ids[:length], cut=cut, positions=positions[:, :length])
    close(hidden, theirs.hidden[:length], "hidden")
    sequence.turn(delta)
    wanted = torch.log_softmax(torch.as_tensor(theirs.logits), dim=-1).numpy()
    for at in range(length, length + 5):
        out = sequence.feed(ids[at])
        close(out.top_logprobs[0], wanted[at][out.top_tokens[0]], f"token {at}: log-probabilities")
    for (k, _), keys in zip(sequence.pages(length + 5), theirs.keys, strict=True):
        close(k.codes, keys, "keys")
    assert CASES[NAME].layers == 8
