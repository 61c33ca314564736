"""The settings that one engine is compiled for: capacities, formats and numeric types. Nothing here changes after start.

What is left at None (or "auto") is chosen for the model and for what is free on the device: `ninfer_jax.planning.choose`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ninfer_jax.files import shown, user_path
from pallas_kernels.kv_formats import PAGE, check_format

MAX_CONTEXT = 262_144
MAX_DRAFT = 5
MAX_SLOTS = 4
DTYPES = ("auto", "float32", "bfloat16")
# Who drafts -> what help texts say of them.
DRAFTERS = {
    "mtp": "the checkpoint's MTP head",
    "lookup": "what followed the last tokens when they stood in the sequence before",
    "mtp+lookup": "the same, and the MTP head where nothing is found",
    "none": "nobody",
}
# Whose kernels a CPU runs -> what help texts say of them.
KERNELS = {"auto": "what suits the device", "cpu": "compiled by LLVM for this CPU", "xla": "XLA's own operations"}
# Modes of the prefix cache -> what help texts say of them.
CACHE_MODES = {
    "auto": "exact for many callers, else off",
    "exact": "warm answers equal cold ones",
    "fast": "less is prefilled again, last bits may differ",
    "off": "nothing is kept",
}
# What may be left open, in the order in which a choice is told.
AUTO_FIELDS = ("context", "kv", "draft", "slots", "pool", "prefill_chunk")


@dataclass(frozen=True)
class EngineConfig:
    """Fixed shapes of an engine. None, or "auto", leaves a field open: docs/defaults.md says what is chosen then, and nothing that
    is set is ever changed.

    context: capacity of one slot in tokens, prompt and answer together, at most 262,144. A step costs what the filled length
        costs, whatever the capacity. Open: the model's own limit, or as much of it as fits.
    slots: sequences that decode side by side, 1 to 4.
    draft: K, tokens that are proposed a round, 0 (off) to 5. Open: 3, where there is who drafts and it pays.
    kv: format of the KV pages, one of `pallas_kernels.kv_codecs.FORMATS`. Open: the best on a GPU that fits, f32 on a CPU.
    prefill_chunk: tokens that one prefill call processes, a multiple of 64. Open: 1,024 on a GPU and 512 on a CPU.
    pool: tokens that all slots share in the page pool. Open: every slot its full context, or as much as fits, one context at least.
    dtype: type of weights and activations; "auto" is bfloat16 on a GPU and float32 on a CPU. Recurrent states,
        softmax and logits are float32 always.
    tokenizer: "auto" is the checkpoint's own; None does without: prompts are token ids, answers have ids and no text, and every
        row of the output head may be drawn.
    kernels: what a round runs through on a CPU. "cpu", which "auto" takes there: kernels that LLVM compiles, in which a row has the
        same bits whatever runs beside it. "xla": XLA's own operations, whose last bits follow their shapes, so that tokens near a
        tie may differ with drafts or beside other sequences. On a card only "auto".
    prefix_cache: whether what was prefilled is kept for prompts that begin alike (`docs/prefix_cache.md`). "exact": answers are
        bit for bit what they are without. "fast": less is prefilled again, and an answer may differ where two tokens are nearly
        equally likely. "off". "auto" is "exact" in an engine for many callers and "off" in the blocking one.
    cache_bytes: host memory for it; None takes a quarter of what is free, at most 8 GiB.
    cache_dir: a directory that keeps it from start to start, of at most cache_dir_bytes; None keeps nothing.
    drafter: who drafts. "mtp": the checkpoint's MTP head. "lookup": what followed the sequence's last tokens when they stood in it
        before, for every checkpoint; a round without such a place has no drafts. "mtp+lookup": the same, and the MTP head where
        there is no such place, or too little of it. "none": nobody, whatever `draft` is. Tokens are the same with each.
    program_cache: whether compiled programs are kept for the next start, in `$XDG_CACHE_HOME/ninfer_jax/programs`. "auto" keeps
        them, unless JAX's own compilation cache is in use or NINFER_JAX_PROGRAM_CACHE is "off" in the environment. "off".
    """

    context: int | None = None
    slots: int | None = None
    draft: int | None = None
    kv: str | None = None
    prefill_chunk: int | None = None
    pool: int | None = None
    dtype: str = "auto"
    tokenizer: str | None = "auto"
    kernels: str = "auto"
    prefix_cache: str = "auto"
    cache_bytes: int | None = None
    cache_dir: str | Path | None = None
    cache_dir_bytes: int = 64 << 30
    drafter: str = "mtp"
    program_cache: str = "auto"

    def __post_init__(self) -> None:
        for field in AUTO_FIELDS:
            if getattr(self, field) == "auto":
                object.__setattr__(self, field, None)
        if self.slots is not None:
            _between("slots", self.slots, 1, MAX_SLOTS)
        if self.draft is not None:
            _between("draft", self.draft, 0, MAX_DRAFT)
        if self.drafter not in DRAFTERS:
            raise ValueError(f"drafter is {shown(self.drafter)}, known are {', '.join(DRAFTERS)}")
        if "lookup" in self.drafter and self.draft == 0:
            raise ValueError(
                f"drafter is '{self.drafter}', but draft is 0, so nothing would be drafted: set draft from 1 to {MAX_DRAFT}"
            )
        if self.context is not None:
            _between("context", self.context, 1, MAX_CONTEXT)
        if self.pool is not None:
            _between("pool", self.pool, 1, MAX_SLOTS * MAX_CONTEXT)
        if self.prefill_chunk is not None:
            _between("prefill_chunk", self.prefill_chunk, PAGE, 8192)
            if self.prefill_chunk % PAGE:
                raise ValueError(f"prefill_chunk is {self.prefill_chunk}, it must be a multiple of {PAGE}")
        if self.kv is not None:
            check_format(self.kv)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {shown(self.dtype)}, known are {', '.join(DTYPES)}")
        if self.tokenizer not in (None, "auto"):
            raise ValueError(
                f"tokenizer is {shown(self.tokenizer)}, it must be 'auto' (the checkpoint's own) or None (token ids alone)"
            )
        if self.kernels not in KERNELS:
            raise ValueError(f"kernels is {shown(self.kernels)}, known are {', '.join(KERNELS)}")
        if self.prefix_cache not in CACHE_MODES:
            raise ValueError(f"prefix_cache is {shown(self.prefix_cache)}, known are {', '.join(CACHE_MODES)}")
        if self.program_cache not in ("auto", "off"):
            raise ValueError(f"program_cache is {shown(self.program_cache)}, known are auto, off")
        if self.cache_bytes is not None:
            _between("cache_bytes", self.cache_bytes, 1, 1 << 50)
        _between("cache_dir_bytes", self.cache_dir_bytes, 1, 1 << 60)
        if self.cache_dir is not None:
            user_path(self.cache_dir, "cache_dir")
            if self.prefix_cache == "off":
                raise ValueError("cache_dir is given, but prefix_cache is 'off': take 'exact' or 'fast', or leave cache_dir out")

    @property
    def mtp(self) -> bool:
        """Whether the MTP head is asked to draft: not where that is left open."""
        return bool(self.draft) and "mtp" in self.drafter


def _between(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} is {shown(value)}, it must be an integer from {low} to {high}")
    if not low <= value <= high:
        raise ValueError(f"{field} is {shown(value)}, it must be from {low} to {high}")
