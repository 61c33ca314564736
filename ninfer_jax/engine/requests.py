"""From prompts to sequences: all that can be refused about a request, known before weights are read or programs compiled."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from ninfer_jax.decoding import Grammar, SamplingParams
from ninfer_jax.decoding.params import MAX_STOP_IDS
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.text import CheckpointText, render_prompt, starts_in_reasoning
from ninfer_jax.text.grammar import GrammarError, Grammars
from ninfer_jax.text.guide import Guide

Prompt = str | SequenceOf[int] | SequenceOf[Mapping[str, Any]]


@dataclass(frozen=True)
class Requests:
    """text: the model directory's. context: tokens of a slot; pool_tokens: of all pages together; rows: of the output head."""

    text: CheckpointText
    context: int
    pool_tokens: int
    rows: int

    @cached_property
    def grammars(self) -> Grammars:
        """The compiler of grammars: made when it is first asked for, which takes seconds with 248,077 ids."""
        if not self.text.tokenizer.has_text:
            raise GrammarError("grammar: needs texts, and the engine was loaded without a tokenizer (tokenizer=None)")
        return Grammars(self.text.tokenizer, self.rows, self.text.defaults.eos_ids)

    def default_params(self, **changes: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults, with `changes` on top."""
        return replace(SamplingParams(**self.text.defaults.sampling), **changes)

    def prompt_ids(self, prompt: Prompt, template_options: Mapping[str, Any]) -> list[int]:
        """The token ids that a prompt becomes; ValueError for one that cannot become any."""
        tokenizer, template, messages = self.text.tokenizer, self.text.template, cast(Any, prompt)
        are_messages = isinstance(prompt, SequenceOf) and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)
        if (are_messages or isinstance(prompt, str)) and not tokenizer.has_text:
            raise ValueError("prompt is text, but the engine was loaded without a tokenizer (tokenizer=None): give token ids")
        if are_messages:
            if template is None:
                raise ValueError("messages: this checkpoint has no chat template, give text or token ids")
            return render_prompt(template, tokenizer, list(messages), **template_options).ids
        if template_options:
            raise ValueError(f"{', '.join(template_options)}: only messages go through the chat template")
        return tokenizer.encode(prompt) if isinstance(prompt, str) else self.check_ids(prompt)

    def check_ids(self, tokens: Any) -> list[int]:
        """`tokens` as integers; ValueError where they are none, or none of the tokenizer's."""
        ids = [int(t) for t in tokens] if _are_integers(tokens) else None
        if ids is None:
            raise ValueError("prompt must be text, a list of token ids or a list of messages")
        if not ids:
            raise ValueError("prompt is empty")
        known = self.text.tokenizer.vocab_size
        bad = next((t for t in ids if not 0 <= t < known), None)
        if bad is not None:
            raise ValueError(f"prompt holds token id {bad}, the vocabulary has 0 to {known - 1}")
        return ids

    def sequence(self, prompt: Prompt, params: SamplingParams | None, template_options: Mapping[str, Any]) -> Sequence:
        """The request; params: None takes the checkpoint's defaults. ValueError for a prompt, a setting or their sum that does
        not fit model, context or pages; GrammarError for a grammar that cannot be followed."""
        params = self.default_params() if params is None else params
        tokenizer, ids = self.text.tokenizer, self.prompt_ids(prompt, template_options)
        if not ids:
            raise ValueError("prompt is empty")
        if len(ids) >= self.context:
            raise ValueError(f"prompt has {len(ids)} tokens, the context holds {self.context} and the answer needs room too")
        for field, used in (("logit_bias", params.logit_bias), ("stop_ids", params.stop_ids)):
            if used and max(used) >= tokenizer.vocab_size:
                raise ValueError(f"{field} names token {max(used)}, the vocabulary has {tokenizer.vocab_size}")
        if params.stop and not tokenizer.has_text:
            raise ValueError("stop: texts end nothing without a tokenizer (tokenizer=None): give stop_ids")
        room = min(self.context, self.pool_tokens) - len(ids)
        if room <= 0:
            raise ValueError(f"prompt has {len(ids)} tokens, the page pool holds {self.pool_tokens}")
        budget = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
        ends = tuple(dict.fromkeys((() if params.ignore_eos else self.text.defaults.eos_ids) + params.stop_ids))
        if len(ends) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids: {len(ends)} end tokens together with the model's own, at most {MAX_STOP_IDS} are allowed")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        guide = None if params.grammar is None else self._guide(params.grammar, ids)
        return Sequence(ids, params, budget, seed, ends, tokenizer, guide)

    def _guide(self, grammar: Grammar, ids: list[int]) -> Guide:
        tokenizer = self.text.tokenizer
        return Guide(self.grammars.matcher(grammar), tokenizer, starts_in_reasoning(ids, tokenizer))


def _are_integers(tokens: Any) -> bool:
    if isinstance(tokens, np.ndarray):
        return tokens.ndim == 1 and np.issubdtype(tokens.dtype, np.integer)
    # Bytes are a sequence of integers too, but whoever passes them means text.
    return (
        isinstance(tokens, SequenceOf)
        and not isinstance(tokens, bytes | bytearray)
        and all(isinstance(t, int | np.integer) and not isinstance(t, bool) for t in tokens)
    )
