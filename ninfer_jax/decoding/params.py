"""A caller's wishes for sampling, checked field by field before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ninfer_jax.decoding.grammar import Grammar
from ninfer_jax.files import lone_surrogate, shown

MAX_BIASES = 1024
MAX_STOP_IDS = 16
MAX_TOP_LOGPROBS = 20
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class SamplingParams:
    """Settings by which one completion is drawn. Every value is checked; ValueError names the field.

    max_new_tokens: tokens to generate at most; None goes on to the end of the context.
    temperature: 0 takes the most likely token (lowest id on ties), after penalties and biases.
    top_k: keep the k most likely, 0 or -1 keeps all. top_p: keep the smallest set of at least this probability (0 keeps
        one). min_p: drop tokens below this fraction of the most likely one. Applied in this order after temperature.
    presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens already generated.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the answer.
    logit_bias: token id -> number added to its logit.
    logprobs: None, or how many alternatives (0 to 20) to report beside each token, from the unmodified distribution.
    seed: same seed, same tokens, whatever the other slots do and whether or not drafts are used; None draws one.
    stop: strings that end the completion and are not part of it. stop_ids: token ids that end it, beside the model's.
    ignore_eos: go on past the model's own end tokens.
    grammar: what the answer, behind its reasoning, must follow; see `ninfer_jax.text.grammar`. Not with ignore_eos.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            _integer("max_new_tokens", self.max_new_tokens, 1, _INT32_MAX)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, _INT32_MAX)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.seed is not None:
            _integer("seed", self.seed, 0, (1 << 64) - 1)
        if not isinstance(self.stop, list | tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop is {shown(self.stop)}, it must be a list or tuple of non-empty strings")
        for at, text in enumerate(self.stop):
            if found := lone_surrogate(text):
                raise ValueError(f"stop[{at}]: {found}")
        if not isinstance(self.stop_ids, list | tuple):
            raise ValueError(f"stop_ids is {shown(self.stop_ids)}, it must be a list or tuple of token ids")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids has {len(self.stop_ids)} entries, at most {MAX_STOP_IDS} are allowed")
        for token in self.stop_ids:
            _integer("stop_ids", token, 0, _INT32_MAX)
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is {shown(self.ignore_eos)}, it must be True or False")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ValueError(f"grammar is {shown(self.grammar)}, it must be made by ninfer_jax.text.grammar")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("ignore_eos: an answer with a grammar ends where the grammar does")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias is {shown(self.logit_bias)}, it must map token ids to numbers")
        if len(self.logit_bias) > MAX_BIASES:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_BIASES} are allowed")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, _INT32_MAX)
            _number(f"logit_bias[{token}]", bias, -1e4, 1e4)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {shown(value)}, it must be an integer from {low} to {high}")
    if not low <= value <= high:
        raise ValueError(f"{name} is {shown(value)}, it must be from {low} to {high}")


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {shown(value)}, it must be a number from {low:g} to {high:g}")
    if not low <= value <= high:  # NaN compares false
        raise ValueError(f"{name} is {shown(value)}, it must be from {low:g} to {high:g}")
