"""The share of drafts that are accepted: greedy continuations from places in a text, counted round by round."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from ninfer_jax.decoding import SamplingParams
from ninfer_jax.engine import Engine
from ninfer_jax.evaluate.forced import Progress


@dataclass(frozen=True)
class Acceptance:
    """draft: K. rounds, accepted: counts; drafted: K a round, whether or not there was something to look up. accepted_share:
    accepted / drafted; tokens_per_round: 1 + accepted / rounds. by_place[j]: share of rounds whose draft j + 1 was accepted,
    which needs all drafts before it accepted too."""

    kv: str
    draft: int
    prompts: int
    rounds: int
    drafted: int
    accepted: int
    accepted_share: float
    tokens_per_round: float
    by_place: list[float]
    drafter: str = "mtp"


def cut_prompts(ids: SequenceOf[int], prompts: int, length: int) -> list[list[int]]:
    """`prompts` stretches of `length` tokens, evenly spread over the text; ValueError if it is too short."""
    if len(ids) < prompts * length:
        needed = prompts * length
        raise ValueError(f"the text has {len(ids)} tokens, {prompts} prompts of {length} need {needed}; give a longer text")
    step = (len(ids) - length) // max(prompts - 1, 1)
    return [list(ids[n * step : n * step + length]) for n in range(prompts)]


def draft_acceptance(
    engine: Engine, prompts: SequenceOf[SequenceOf[int]], max_new: int, progress: Progress | None = None
) -> Acceptance:
    """Continue each prompt greedily by `max_new` tokens, end tokens ignored. A continuation's last round is not counted: the
    length limit may have cut its drafts off. ValueError if the engine does not draft."""
    draft = engine.programs.shape.draft
    if not draft:
        raise ValueError("draft is 0: nothing is drafted that could be accepted")
    params = SamplingParams(temperature=0, max_new_tokens=max_new, ignore_eos=True)
    rounds: list[int] = []
    for done, prompt in enumerate(prompts, 1):
        # One piece a round, and before them the token that the prompt itself gave, with a piece of its own or in the first round's.
        pieces = [len(piece.tokens) for piece in engine.stream(prompt, params) if piece.tokens]
        emitted = [count for count in (pieces[0] - 1, *pieces[1:]) if count]
        rounds += [count - 1 for count in emitted[:-1]]
        if progress:
            progress(done, len(prompts))
    if not rounds:
        raise ValueError(f"max_new is {max_new}: too few tokens for a whole round of {draft} drafts")
    count, accepted = len(rounds), sum(rounds)
    return Acceptance(
        kv=engine.programs.shape.kv,
        draft=draft,
        prompts=len(prompts),
        rounds=count,
        drafted=count * draft,
        accepted=accepted,
        accepted_share=accepted / (count * draft),
        tokens_per_round=1 + accepted / count,
        by_place=[sum(a > place for a in rounds) / count for place in range(draft)],
        drafter=engine.programs.shape.drafter,
    )
