"""The public engine: load once, then generate, stream and score with programs that never change."""

from __future__ import annotations

import secrets
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ninfer_jax.config import EngineConfig, ModelConfig, config_notes
from ninfer_jax.decoding import SamplingParams
from ninfer_jax.decoding.params import MAX_STOP_IDS
from ninfer_jax.engine import allocator
from ninfer_jax.engine.memory import check_memory, compiled_workspace, free_bytes
from ninfer_jax.engine.results import Completion, Delta
from ninfer_jax.engine.runner import Runner
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.engine.weights_in import open_weights, why_no_drafts
from ninfer_jax.files import directory, read_object
from ninfer_jax.model_path import model_path
from ninfer_jax.programs import Programs, compilations
from ninfer_jax.programs.executables import StoredPrograms
from ninfer_jax.programs.setup import Setup, resolve
from ninfer_jax.text import ChatTemplate, GenerationDefaults, Tokenizer, open_text, render_prompt
from pallas_kernels.kv_codecs import bytes_per_vector

Prompt = str | SequenceOf[int] | SequenceOf[Mapping[str, Any]]
LoadProgress = Callable[[str, int, int], None]


class Engine:
    """A model with its programs and state on one device; make one with `Engine.load`.

    A prompt is raw text, a list of token ids, or a list of chat messages. Completions run side by side in the slots;
    the engine itself belongs to one thread.
    """

    def __init__(
        self,
        runner: Runner,
        programs: Programs,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: GenerationDefaults,
        model_config: ModelConfig,
        notes: tuple[str, ...],
        started_at: int,
    ):
        self._runner, self._programs = runner, programs
        self.tokenizer, self.template, self.defaults, self.model_config = tokenizer, template, defaults, model_config
        self._notes, self._started_at = notes, started_at

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        programs: str | Path | None = None,
        verify: bool = True,
        progress: LoadProgress | None = None,
    ) -> Engine:
        """Read a Hugging Face checkpoint directory, an artifact (`ninfer-jax convert`) or "tiny", the bundled model, compile the
        programs and allocate the state. On a CPU an artifact's weights are expanded to the numbers they stand for.

        programs: a directory that `ninfer-jax compile` wrote for this very configuration and device: its executables are
        loaded (they are pickles: name only a directory you trust) and nothing is traced or compiled. verify: compare the SHA-256
        of an artifact's arrays with its manifest; without, damaged numbers go unnoticed. progress: called with
        ("weights", bytes done, bytes in all), then ("programs", compiled, in all). ValueError, on one line, for anything in
        the directory or the configuration that does not fit, memory included; nothing is ever guessed or made up.
        """
        started_at = compilations()
        config = config or EngineConfig()
        tell = progress or (lambda stage, done, total: None)
        path = model_path(path)
        programs = None if programs is None else directory(programs, "programs", "programs: ")
        model_config = ModelConfig.from_hf(path)
        weights = open_weights(path, verify)
        if config.draft and (why := why_no_drafts(path, model_config, weights)):
            raise ValueError(f"draft is {config.draft}, but {why}")
        words = open_text(path, model_config.vocab_size, config.tokenizer)
        notes = (*config_notes(read_object(path / "config.json")), *words.notes)

        def setup_for(platform: str) -> Setup:
            return resolve(model_config, words.tokenizer.vocab_size, config, platform, weights.recipe(platform))

        allocator.reserve(lambda: setup_for("cuda"))  # before the next line starts JAX
        setup = setup_for("cpu" if jax.default_backend() == "cpu" else "cuda")
        ready, text = setup.programs(), setup.text_model()
        # Whatever can be refused is refused before the minutes that compiling takes: weights are read, and checked, first.
        weights.check(text)
        stored = None if programs is None else StoredPrograms.open(programs, setup, ready)
        free = free_bytes(jax.devices()[0])
        check_memory(ready, free, stored.workspace_bytes if stored else 0)
        parameters = weights.parameters(text, lambda done, total: tell("weights", done, total))
        if stored:
            stored.adopt(ready)
        else:
            ready.compile_all(lambda done, total: tell("programs", done, total))
            check_memory(ready, free, compiled_workspace(ready))
        runner = Runner(ready, parameters, ready.allocate())
        return cls(runner, ready, words.tokenizer, words.template, words.defaults, model_config, notes, started_at)

    @property
    def device(self) -> str:
        """The device in words, for instance "cpu" or "NVIDIA GeForce RTX 4090"."""
        return jax.devices()[0].device_kind

    @property
    def context(self) -> int:
        """Tokens that prompt and answer of one completion may have together."""
        return self._programs.shape.context

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each setting of the checkpoint's files that is passed over or has no effect here."""
        return self._notes

    @property
    def programs(self) -> Programs:
        """The compiled programs, for inspection."""
        return self._programs

    @property
    def runner(self) -> Runner:
        """The owner of slots, pages and state, for inspection."""
        return self._runner

    @property
    def compilations(self) -> int:
        """Programs compiled in this process since the engine started to load."""
        return compilations() - self._started_at

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the attention layers' pages (the MTP layer's own not counted)."""
        kv, config = self._programs.shape.kv, self.model_config
        vector = sum(bytes_per_vector(kv, part, config.head_dim) for part in ("k", "v"))
        return vector * config.kv_heads * len(config.attention_layers)

    def default_params(self, **changes: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults, with `changes` on top."""
        return replace(SamplingParams(**self.defaults.sampling), **changes)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
        **template_options: Any,
    ) -> Completion:
        """Complete a prompt. params: None takes the checkpoint's defaults. template_options (`tools`,
        `enable_thinking`, ...) apply to messages only. on_prefill: called with (prompt tokens done, in all)."""
        *_, last = self.stream(prompt, params, on_prefill=on_prefill, **template_options)
        assert last.completion is not None
        return last.completion

    def generate_many(
        self, prompts: SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete several prompts, as many at a time as there are slots; the results are in the prompts' order."""
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params has {len(each)} entries for {len(prompts)} prompts")
        sequences = [self._sequence(prompt, own, {}) for prompt, own in zip(prompts, each, strict=True)]
        work = self._work(sequences)
        for sequence in sequences:
            sequence.reader = weakref.ref(work)
        deque(work, maxlen=0)  # no line of Python between two steps: an exception at one would leave `work` waiting to go on
        return [s.completion() for s in sequences]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
        **template_options: Any,
    ) -> Iterator[Delta]:
        """The same in pieces, as they are produced; the last piece carries the completion. Closing the iterator early
        frees the slot. Several streams may be read alternately, up to the number of slots. AnswerLost if an exception, out of
        another stream's call for instance, has stopped the engine while it computed."""
        sequence = self._sequence(prompt, params, template_options)
        pieces = self._pieces(sequence, on_prefill)
        sequence.reader = weakref.ref(pieces)
        return pieces

    def score(self, tokens: SequenceOf[int]) -> np.ndarray:
        """Teacher-forced logits through the prefill program: float32 `[tokens, vocab rows]`; row t predicts token t + 1.
        Padding rows of the vocabulary are included, as the checkpoint's head computes them."""
        ids = self._check_ids(tokens)
        if len(ids) > self.context:
            raise ValueError(f"score: {len(ids)} tokens, the context holds {self.context}")
        return self._runner.score(ids)

    def prompt_ids(self, prompt: Prompt, **template_options: Any) -> list[int]:
        """The token ids that a prompt becomes."""
        messages: Any = prompt
        are_messages = isinstance(prompt, SequenceOf) and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)
        if (are_messages or isinstance(prompt, str)) and not self.tokenizer.has_text:
            raise ValueError("prompt is text, but the engine was loaded without a tokenizer (tokenizer=None): give token ids")
        if are_messages:
            if self.template is None:
                raise ValueError("messages: this checkpoint has no chat template, give text or token ids")
            return render_prompt(self.template, self.tokenizer, list(messages), **template_options).ids
        if template_options:
            raise ValueError(f"{', '.join(template_options)}: only messages go through the chat template")
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else self._check_ids(prompt)

    def _work(self, sequences: list[Sequence]) -> Generator[None, None, None]:
        """Brings them to their ends, a step each time it is read. Once it has ended, however it did, they are out of the engine."""
        try:
            for sequence in sequences:
                self._runner.submit(sequence)
            while not all(s.finished for s in sequences):
                self._runner.advance()
                yield
        finally:
            self._end(sequences)

    def _pieces(self, sequence: Sequence, on_prefill: Callable[[int, int], None] | None) -> Generator[Delta, None, None]:
        progress = on_prefill and (lambda who, done: on_prefill(done, len(who.prompt)) if who is sequence else None)
        try:
            self._runner.submit(sequence)
            completion = None
            while completion is None:
                # Another stream's rounds may have finished this one since its last piece.
                if not sequence.finished:
                    self._runner.advance(progress)
                sequence.stats.compilations = self.compilations
                piece = sequence.take()
                completion = piece.completion
                if piece.text or piece.reasoning or piece.tokens or completion:
                    yield piece
        finally:
            self._end([sequence])

    def _end(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.stats.compilations = self.compilations
            if not sequence.finished:
                self._runner.cancel(sequence)

    def _sequence(self, prompt: Prompt, params: SamplingParams | None, template_options: dict[str, Any]) -> Sequence:
        params = self.default_params() if params is None else params
        ids = self.prompt_ids(prompt, **template_options)
        if not ids:
            raise ValueError("prompt is empty")
        if len(ids) >= self.context:
            raise ValueError(f"prompt has {len(ids)} tokens, the context holds {self.context} and the answer needs room too")
        for field, used in (("logit_bias", params.logit_bias), ("stop_ids", params.stop_ids)):
            if used and max(used) >= self.tokenizer.vocab_size:
                raise ValueError(f"{field} names token {max(used)}, the vocabulary has {self.tokenizer.vocab_size}")
        if params.stop and not self.tokenizer.has_text:
            raise ValueError("stop: texts end nothing without a tokenizer (tokenizer=None): give stop_ids")
        room = min(self.context, self._runner.pool_tokens) - len(ids)
        if room <= 0:
            raise ValueError(f"prompt has {len(ids)} tokens, the page pool holds {self._runner.pool_tokens}")
        budget = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
        ends = tuple(dict.fromkeys((() if params.ignore_eos else self.defaults.eos_ids) + params.stop_ids))
        if len(ends) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids: {len(ends)} end tokens together with the model's own, at most {MAX_STOP_IDS} are allowed")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        sequence = Sequence(ids, params, budget, seed, ends, self.tokenizer)
        sequence.stats.kv_bytes_per_token = self.kv_bytes_per_token
        return sequence

    def _check_ids(self, tokens: Any) -> list[int]:
        ids = [int(t) for t in tokens] if _are_integers(tokens) else None
        if ids is None:
            raise ValueError("prompt must be text, a list of token ids or a list of messages")
        if not ids:
            raise ValueError("prompt is empty")
        bad = next((t for t in ids if not 0 <= t < self.tokenizer.vocab_size), None)
        if bad is not None:
            raise ValueError(f"prompt holds token id {bad}, the vocabulary has 0 to {self.tokenizer.vocab_size - 1}")
        return ids


def _are_integers(tokens: Any) -> bool:
    if isinstance(tokens, np.ndarray):
        return tokens.ndim == 1 and np.issubdtype(tokens.dtype, np.integer)
    # Bytes are a sequence of integers too, but whoever passes them means text.
    return (
        isinstance(tokens, SequenceOf)
        and not isinstance(tokens, bytes | bytearray)
        and all(isinstance(t, int | np.integer) and not isinstance(t, bool) for t in tokens)
    )
