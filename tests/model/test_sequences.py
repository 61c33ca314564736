"""The differentiable path over whole sequences, which training uses, against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch_reference import VOCAB

from ninfer_jax.model import checkpoint_tensors
from ninfer_jax.model.sequence import forward_sequences, mtp_sequences

CASES = ["ratio3-8layers", "ratio2-8layers-tied"]


@pytest.fixture(scope="module")
def batch():
    return np.random.default_rng(5).integers(0, VOCAB, (2, 192))


@pytest.mark.parametrize("name", CASES)
def test_hidden_and_logits(name, harness, reference, batch, close):
    model = harness(name).model
    hidden = nnx.jit(forward_sequences)(model, batch)
    logits = model.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*batch.shape, -1)
    for row, ids in enumerate(batch):
        theirs = reference(name).forward(ids)
        close(hidden[row], theirs.hidden, "hidden")
        close(logits[row], theirs.logits, "logits")


@pytest.mark.parametrize("name", CASES)
def test_mtp(name, harness, reference, batch, close):
    model = harness(name).model
    following = np.roll(batch, -1, axis=1)
    hidden = np.stack([reference(name).forward(ids).hidden for ids in batch])
    ours = nnx.jit(mtp_sequences)(model, hidden, following)
    for row in range(len(batch)):
        theirs, logits, _, _ = reference(name).mtp(hidden[row], following[row])
        close(ours[row], theirs, "hidden")
        close(model.logits(ours[row]), logits, "logits")


def test_gradient(harness, reference, batch, close):
    """Of the mean next-token loss with respect to every kind of parameter, against autograd."""
    name = "ratio2-4layers"
    model, ids = harness(name).model, batch[:1, :128]
    graph, parameters = nnx.split(model)

    def loss(parameters):
        model = nnx.merge(graph, parameters)
        hidden = forward_sequences(model, ids)
        log_p = jax.nn.log_softmax(model.logits(hidden[0, :-1]))
        return -jnp.mean(jnp.take_along_axis(log_p, jnp.asarray(ids[0, 1:, None]), axis=1))

    ours = checkpoint_tensors(jax.jit(jax.grad(loss))(parameters))

    text, head = reference(name).text, reference(name).head
    tokens = torch.as_tensor(ids)
    logits = head(text(input_ids=tokens, use_cache=False).last_hidden_state)[0, :-1]
    torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).backward()
    theirs = {n: p.grad.numpy().copy() for n, p in text.named_parameters()} | {"lm_head.weight": head.weight.grad.numpy().copy()}
    text.zero_grad()
    head.zero_grad()
    for key, wanted in theirs.items():
        close(ours[key], wanted, key, 1e-4)
