"""Train the bundled model, `weights/tiny`: the 27B's architecture at 7 million parameters, MTP head included.

    make train        # = train_tiny.py --steps 4000 --stop 1600, then train_tiny.py --resume --steps 1400 --rate 1.5e-3

The network is the one that serves (`ninfer_jax.model`), run over whole sequences. The MTP head is trained jointly and
unrolled three steps, because drafting applies it to its own output; its targets are the trunk's own distributions, as
those, and not the text, decide whether a draft is accepted. Writes config.json, model.safetensors (BF16), training.json
(recipe, seed, versions, losses) and loss.png into the output directory, and checkpoints on the way.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tiny_chat import chat_documents
from tiny_corpus import build_corpus, check_digest
from tiny_tokenizer import TINY_DIR, encode_split, load_tokenizer

from ninfer_jax.checkpoints import Checkpoint, TensorSpec, load_parameters, save_checkpoint
from ninfer_jax.config import ModelConfig
from ninfer_jax.model import TextModel, checkpoint_tensors, fill, parameter_specs, split_model
from ninfer_jax.model.sequence import forward_sequences, mtp_sequences

VOCAB_ROWS = 1088  # 1024 ids and 64 rows that no token has, as the real vocabulary is padded too
HF_CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": VOCAB_ROWS,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "mamba_ssm_dtype": "float32",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
MTP_WEIGHTS = (0.3, 0.2, 0.15)  # loss weights of the draft steps


def initial(spec: TensorSpec, rng: np.random.Generator, layers: int) -> np.ndarray:
    """Usual small-model starting values; the decay gates follow the Mamba-2 recipe (dt from 1e-3 to 1e-1)."""
    name = spec.name
    if name.endswith("linear_attn.norm.weight"):
        return np.ones(spec.shape, np.float32)
    if spec.role == "norm":
        return np.zeros(spec.shape, np.float32)
    if name.endswith("A_log"):
        return np.log(rng.uniform(1, 16, spec.shape)).astype(np.float32)
    if name.endswith("dt_bias"):
        dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), spec.shape))
        return (dt + np.log(-np.expm1(-dt))).astype(np.float32)
    if spec.role == "conv":
        return rng.uniform(-0.5, 0.5, spec.shape).astype(np.float32)
    into_residual = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
    scale = 0.04 / np.sqrt(2 * layers) if into_residual else 0.04
    return (rng.standard_normal(spec.shape) * scale).astype(np.float32)


def cross_entropy(model: TextModel, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """Nats per target, `[batch, tokens]`."""
    logits = model.logits(hidden.reshape(-1, hidden.shape[-1]))
    chosen = jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=1)[:, 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).reshape(targets.shape)


def agreement_loss(model: TextModel, hidden: jax.Array, target_logits: jax.Array) -> jax.Array:
    """Cross-entropy of drafts against the trunk's distribution, `[batch, tokens]`; no gradient reaches the target."""
    logits = model.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(target_logits.shape)
    target = jax.lax.stop_gradient(jax.nn.softmax(target_logits, axis=-1))
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(target * logits, axis=-1)


def windows(stream: np.ndarray, batch: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Random stretches of the stream; every token starts a stretch equally often."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(stream) - size, batch)
        yield np.stack([stream[s : s + size] for s in starts]).astype(np.int32)


def heldout_nats(evaluate, parameters, stream: np.ndarray, length: int, batch: int) -> float:
    """Sum of nats over the stream, cut into stretches that each start without history (an upper bound)."""
    total = 0.0
    padded = np.pad(stream, (0, -(len(stream) - 1) % (length * batch)))
    count = len(stream) - 1
    for start in range(0, count, length * batch):
        rows = np.stack([padded[start + r * length : start + r * length + length + 1] for r in range(batch)])
        nats = np.asarray(evaluate(parameters, rows.astype(np.int32))).reshape(-1)
        total += float(nats[: max(0, count - start)].sum())
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=TINY_DIR)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--stop", type=int, help="end after this step of the schedule, to go on with --resume")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=2.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, with fresh moments")
    parser.add_argument("--checkpoint-every", type=int, default=500)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    corpus = build_corpus()
    if note := check_digest(corpus):
        print(note)
    tokenizer = load_tokenizer()
    train = encode_split(corpus.train + chat_documents(corpus, seed=args.seed), tokenizer)
    heldout = encode_split(corpus.heldout, tokenizer)
    heldout_bytes = sum(len(d.text.encode()) for d in corpus.heldout)

    config = ModelConfig.from_hf(HF_CONFIG)
    model = TextModel(config, jnp.float32, mtp=True)
    graph, described = split_model(model)
    rng = np.random.default_rng(args.seed)
    specs = parameter_specs(model)
    history: dict[str, list] = {"stages": [], "train": [], "heldout": []}
    if args.resume:
        arrays = load_parameters(Checkpoint.open(args.out), specs, device_put=jax.device_put)
        history = {key: json.loads((args.out / "training.json").read_text())[key] for key in history}
    else:
        arrays = {s.name: jnp.asarray(initial(s, rng, config.layers)) for s in specs}
    parameters = fill(described, arrays)
    done = history["train"][-1][0] if history["train"] else 0
    stage = {"steps": args.steps, "batch": args.batch, "length": args.length, "rate": args.rate, "seed": args.seed}
    history["stages"].append(stage)
    ahead = len(MTP_WEIGHTS)

    def loss(parameters, tokens):
        model = nnx.merge(graph, parameters)
        length = args.length
        hidden = forward_sequences(model, tokens[:, :length])
        logits = model.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*hidden.shape[:2], -1)
        chosen = jnp.take_along_axis(logits, tokens[:, 1 : length + 1, None], axis=-1)[..., 0]
        main_loss = (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()
        total, draft_losses = main_loss, []
        for step, weight in enumerate(MTP_WEIGHTS):
            hidden = mtp_sequences(model, hidden, tokens[:, 1 + step : length + 1 + step])
            # Slot t proposes token t + 2 + step, which the trunk predicts from position t + 1 + step.
            known = length - 1 - step
            draft = agreement_loss(model, hidden[:, :known], logits[:, 1 + step :]).mean()
            total += weight * draft
            draft_losses.append(draft)
        return total, (main_loss, *draft_losses)

    schedule = optax.warmup_cosine_decay_schedule(0.0, args.rate, min(200, args.steps // 4), args.steps, args.rate * 0.02)
    # Weight decay on matrices only: norms, gates and convolution taps have their own scale.
    decays = lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree)  # noqa: E731
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.1, mask=decays))
    moments = optimiser.init(parameters)

    @jax.jit
    def step(parameters, moments, tokens):
        (_, parts), grads = jax.value_and_grad(loss, has_aux=True)(parameters, tokens)
        updates, moments = optimiser.update(grads, moments, parameters)
        return optax.apply_updates(parameters, updates), moments, jnp.stack(parts)

    @jax.jit
    def evaluate(parameters, tokens):
        model = nnx.merge(graph, parameters)
        return cross_entropy(model, forward_sequences(model, tokens[:, :-1]), tokens[:, 1:])

    def save(parameters):
        flat = checkpoint_tensors(parameters)
        save_checkpoint(args.out, {n: np.asarray(a).astype(ml_dtypes.bfloat16) for n, a in flat.items()}, HF_CONFIG)
        record = {
            "mtp_weights": MTP_WEIGHTS,
            "parameters": sum(a.size for a in flat.values()),
            "train_tokens": len(train),
            "corpus_sha256": corpus.sha256,
            "python": platform.python_version(),
            "jax": jax.__version__,
            "heldout_bytes": heldout_bytes,
            **history,
        }
        (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
        plot(record, args.out / "loss.png")

    batches = windows(train, args.batch, args.length + 1 + ahead, args.seed + done)
    recent: list[np.ndarray] = []
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        last = min(args.stop or args.steps, args.steps)
        task = progress.add_task("training", total=last)
        for number in range(1, last + 1):
            parameters, moments, parts = step(parameters, moments, next(batches))
            recent.append(np.asarray(parts))
            progress.advance(task)
            if number % 50 == 0:
                mean = np.mean(recent, axis=0)
                recent.clear()
                history["train"].append([done + number, *(round(float(x), 4) for x in mean)])
                progress.update(task, description="loss " + " ".join(f"{x:.3f}" for x in mean))
            if number % args.checkpoint_every == 0 or number == last:
                nats = heldout_nats(evaluate, parameters, heldout, args.length, 8) / heldout_bytes
                history["heldout"].append([done + number, round(nats, 4)])
                stage["done"], stage["seconds"] = number, round(time.monotonic() - began)
                progress.console.print(f"step {done + number}: held-out {nats:.4f} nats/byte, {stage['seconds']} s")
                save(parameters)


def plot(record: dict, path: Path) -> None:
    """Loss curves: training and drafts in nats per token, held-out in nats per byte beside the n-gram baseline."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    # Stages may have logged different numbers of draft losses.
    width = max(map(len, record["train"]))
    train = np.array([row + [np.nan] * (width - len(row)) for row in record["train"]])
    for column, label in ((1, "next token"), (2, "first draft"), (3, "second draft"), (4, "third draft")):
        if column < width:
            left.plot(train[:, 0], train[:, column], label=label)
    left.set(xlabel="step", ylabel="nats per token", title="training")
    left.legend()
    heldout = np.array(record["heldout"])
    right.plot(heldout[:, 0], heldout[:, 1], marker="o", label="bundled model")
    baseline = path.parent / "ngram.json"
    if baseline.exists():
        right.axhline(json.loads(baseline.read_text())["nats_per_byte"], color="grey", ls="--", label="order-5 byte n-gram")
    right.set(xlabel="step", ylabel="nats per byte", title="held-out")
    right.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
