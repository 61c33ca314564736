"""The public engine: load once, then generate, stream and score with programs that never change."""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ninfer_jax.cache import Counters
from ninfer_jax.config import EngineConfig, ModelConfig, config_notes
from ninfer_jax.config.engine import AUTO_FIELDS
from ninfer_jax.decoding import SamplingParams
from ninfer_jax.engine import allocator, sessions
from ninfer_jax.engine.identity import identity_of
from ninfer_jax.engine.kept_prefixes import KeptPrefixes
from ninfer_jax.engine.memory import SMALLER, check_memory, compiled_workspace, free_bytes
from ninfer_jax.engine.prefix_settings import open_prefixes
from ninfer_jax.engine.prepared import prepared
from ninfer_jax.engine.requests import Prompt, Requests
from ninfer_jax.engine.results import Completion, Delta
from ninfer_jax.engine.runner import Runner
from ninfer_jax.engine.sequence import Sequence
from ninfer_jax.engine.weights_in import open_weights, why_no_drafts
from ninfer_jax.files import directory, read_object
from ninfer_jax.planning.budget import Place
from ninfer_jax.planning.choose import Choice, choose
from ninfer_jax.planning.host_memory import host_bytes
from ninfer_jax.planning.kept import budget_of, check_budget, mode_of
from ninfer_jax.planning.nearest import nearest, refusal
from ninfer_jax.programs import Programs, compilations
from ninfer_jax.programs.executables import StoredPrograms, with_stored
from ninfer_jax.programs.kept import KeptPrograms, wanted
from ninfer_jax.programs.setup import Setup, resolve
from ninfer_jax.text import ChatTemplate, CheckpointText, GenerationDefaults, Tokenizer, open_text
from ninfer_jax.text.grammar import Grammars
from pallas_kernels import driver, targets
from pallas_kernels.kv_codecs import bytes_per_vector

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
        choice: Choice | None = None,
    ):
        self._runner, self._programs = runner, programs
        self.tokenizer, self.template, self.defaults, self.model_config = tokenizer, template, defaults, model_config
        self._notes, self._started_at, self._choice = notes, started_at, choice
        self._requests: Requests | None = None

    @classmethod
    def load(
        cls,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        recipe: str | None = None,
        programs: str | Path | None = None,
        verify: bool = True,
        before: Callable[[Requests], object] | None = None,
        progress: LoadProgress | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Engine:
        """Read a model, compile the programs, or load those that an earlier start has kept, and allocate the state.

        model: a directory with a Hugging Face checkpoint or an artifact (`ninfer-jax convert`), a GGUF file, a Hub id ("org/name",
        "org/name@revision", "org/name:FILE.gguf"), which is fetched once, or "tiny", the bundled one (docs/models.md). A CPU maps
        an artifact's files, which must stay as they are while the engine lives; without kernels that read them (`kernels="xla"`)
        its weights are expanded to the numbers they stand for.
        recipe: by which a checkpoint is converted, once, into the user's cache directory; by default what `plan` chooses for a
        card, on a CPU the checkpoint as it is, and "none" is that. programs: a directory that `ninfer-jax compile` wrote for this
        very configuration and device (what `config` leaves open is as it was compiled): its executables are loaded (they are
        pickles: name only a directory you trust) and nothing is traced or compiled. verify: compare the SHA-256 of an artifact's
        arrays with its manifest; without, damaged numbers go unnoticed.
        before: called with the `Requests` that the engine will take, before weights are read and programs compiled: a prompt that
        would be refused then can be refused now, by what this raises.
        progress: called with ("weights", bytes done, bytes in all), then ("programs", there, in all), before one that has to be
        compiled as ("programs: NAME", ...), and before these "download", "reading", "converting" and "verifying" where there is
        something to do. say: told in a line what is fetched or converted, before it is; stderr by default.
        ValueError, on one line, for anything in the directory or the configuration that does not fit, memory included; nothing
        is ever guessed or made up.
        """
        started_at = compilations()
        config = config or EngineConfig()
        tell = progress or (lambda stage, done, total: None)
        path = prepared(model, recipe, config=config, say=say, tell=tell)
        programs = None if programs is None else directory(programs, "programs", "programs: ")
        model_config = ModelConfig.from_hf(path)
        weights = open_weights(path, verify)
        why = why_no_drafts(path, model_config, weights)
        if config.mtp and why:
            raise ValueError(f"draft is {config.draft}, but {why}")
        words = open_text(path, model_config.vocab_size, config.tokenizer)
        notes = (*config_notes(read_object(path / "config.json")), *words.notes)

        def asked(platform: str) -> EngineConfig:
            """The configuration, open fields as the stored programs have them, if there are some."""
            card = "cpu" if platform == "cpu" else targets.of_device(driver.card_name() or "")
            return config if programs is None or card is None else with_stored(config, programs, card)

        def chosen(place: Place) -> Choice:
            choice = choose(model_config, asked(place.platform), place, weights.recipe, drafts=not why)
            if asked(place.platform) == config:
                return choice
            fields = tuple(name for name in AUTO_FIELDS if getattr(config, name) is None)
            return dataclasses.replace(choice, chosen=fields, source=f"as the programs in {programs} were compiled")

        def setup_of(choice: Choice) -> Setup:
            platform = choice.place.platform
            return resolve(model_config, words.tokenizer.vocab_size, choice.config, platform, weights.recipe)

        def smaller(more: int = 0) -> list[dict[str, Any]]:
            return nearest(model_config, asked(place.platform), place, weights.recipe, drafts=not why, need_less=more)

        # Before the next line starts JAX, a card is asked through its driver.
        choice = allocator.reserve_for(lambda free: chosen(Place("cuda", "the card", free)), setup_of)
        platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
        if choice is None or platform == "cpu":
            device = jax.devices()[0]
            choice = chosen(Place(platform, device.device_kind, free_bytes(device)))
        setup, place = setup_of(choice), choice.place
        if choice.chosen and not choice.fits and programs is None:  # stored programs know what they take, and no bound is asked
            raise refusal(choice, smaller(), SMALLER)
        if before is not None:
            before(Requests(words, setup.shape.context, setup.shape.pool_tokens, model_config.vocab_size))
        ready, text = setup.programs(), setup.text_model()
        # Whatever can be refused is refused before the minutes that compiling takes: weights are read, and checked, first.
        weights.check(text)
        if (kept := mode_of(config)) != "off":
            check_budget(budget_of(config, host_bytes()), ready.staging_bytes, ready.page_bytes, ready.chunk)
        stored = None if programs is None else StoredPrograms.open(programs, setup, ready)
        free = free_bytes(jax.devices()[0])
        check_memory(ready, free, stored.workspace_bytes if stored else 0, smaller)

        def compiling(name: str, done: int, total: int) -> None:
            tell(f"programs: {name}" if name else "programs", done, total)

        earlier = None
        if stored is None and wanted(config.program_cache):
            earlier = KeptPrograms(setup, ready, lambda line: tell(f"programs: {line}", 0, len(ready.eager)))
            earlier.begin()  # beside the reading of the weights
        parameters = weights.parameters(text, lambda done, total: tell("weights", done, total))
        if stored:
            stored.adopt(ready)
        elif earlier:
            earlier.finish(compiling)
            check_memory(ready, free, earlier.workspace_bytes, smaller)
        else:
            ready.compile_all(compiling)
            check_memory(ready, free, compiled_workspace(ready), smaller)
        runner = Runner(ready, parameters, ready.allocate())
        if kept != "off":
            identity = partial(identity_of, setup, ready, weights, kept)
            runner.prefixes = open_prefixes(runner.pool, config, kept, budget_of(config, host_bytes()), identity)
        return cls(runner, ready, words.tokenizer, words.template, words.defaults, model_config, notes, started_at, choice)

    @property
    def choice(self) -> Choice | None:
        """The configuration that it was loaded in, what of it was left open and chosen, and why."""
        return self._choice

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
        """A line for each setting of the checkpoint's files that is passed over or has no effect here, and for each file of
        `cache_dir` that cannot be used."""
        return (*self._notes, *(self._kept.told if self._kept else ()))

    @property
    def prefix_cache(self) -> str:
        """Mode of the prefix cache: "exact", "fast" or "off"."""
        return self._kept.mode if self._kept else "off"

    @property
    def prefix_counters(self) -> Counters | None:
        """Counters of the prefix cache since the engine started; None where there is none."""
        return self._kept.counters if self._kept else None

    @property
    def programs(self) -> Programs:
        """The compiled programs, for inspection."""
        return self._programs

    @property
    def runner(self) -> Runner:
        """The owner of slots, pages and state, for inspection."""
        return self._runner

    @property
    def requests(self) -> Requests:
        """The way from prompts to sequences, and what is refused on it."""
        text = CheckpointText(self.tokenizer, self.template, self.defaults)
        if self._requests is None or self._requests.text != text:  # kept, because its compiler of grammars is dear
            self._requests = Requests(text, self.context, self._runner.pool_tokens, self.model_config.vocab_size)
        return self._requests

    @property
    def compilations(self) -> int:
        """Programs compiled in this process since the engine started to load."""
        return compilations() - self._started_at

    @property
    def grammars(self) -> Grammars:
        """The compiler of grammars, for one that wants it ready before the first request with one. GrammarError without a
        tokenizer."""
        return self.requests.grammars

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the attention layers' pages (the MTP layer's own not counted)."""
        kv, config = self._programs.shape.kv, self.model_config
        vector = sum(bytes_per_vector(kv, part, config.head_dim) for part in ("k", "v"))
        return vector * config.kv_heads * len(config.attention_layers)

    def default_params(self, **changes: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults, with `changes` on top."""
        return self.requests.default_params(**changes)

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
        ids = self.requests.check_ids(tokens)
        if len(ids) > self.context:
            raise ValueError(f"score: {len(ids)} tokens, the context holds {self.context}")
        return self._runner.score(ids)

    def settle(self) -> None:
        """Do what the prefix cache has put off until nobody waits: prefill of answers (in exact mode), files. An engine for many
        callers does it by itself."""
        while self._runner.idle():
            pass

    def close(self) -> None:
        """End the prefix cache: what is in host memory goes to `cache_dir` first."""
        self._runner.prefixes.close(save=True)

    def save(self, conversation: Prompt, path: str | Path, **template_options: Any) -> int:
        """Write a conversation to a file from which it goes on in another process; how many of its tokens will need no prefill
        there: all in fast mode, in exact mode those up to the last multiple of `prefill_chunk`. conversation: prompt and answer, as
        messages, token ids or text. FileError where the file cannot be written, ValueError without a prefix cache."""
        messages = bool(conversation) and not isinstance(conversation, str) and isinstance(conversation[0], Mapping)
        options = {"add_generation_prompt": False} | template_options if messages else template_options
        ids = self.requests.prompt_ids(conversation, options)
        given = conversation if messages or isinstance(conversation, str) else ids
        return sessions.save(self._sessions("save"), ids, given, path)

    def resume(self, path: str | Path) -> Any:
        """The conversation of a file that `save` wrote: the next prompt that begins with it needs no prefill for what the file
        holds. FileError, one line, where the file is damaged or of another model, format or code."""
        return sessions.load(self._sessions("resume"), path)

    def prompt_ids(self, prompt: Prompt, **template_options: Any) -> list[int]:
        """The token ids that a prompt becomes."""
        return self.requests.prompt_ids(prompt, template_options)

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
                if piece:
                    yield piece
        finally:
            self._end([sequence])

    def _end(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.stats.compilations = self.compilations
            if not sequence.finished:
                self._runner.cancel(sequence)

    def _sequence(self, prompt: Prompt, params: SamplingParams | None, template_options: dict[str, Any]) -> Sequence:
        sequence = self.requests.sequence(prompt, params, template_options)
        sequence.stats.kv_bytes_per_token = self.kv_bytes_per_token
        return sequence

    @property
    def _kept(self) -> KeptPrefixes | None:
        prefixes = self._runner.prefixes
        return prefixes if isinstance(prefixes, KeptPrefixes) else None

    def _sessions(self, what: str) -> KeptPrefixes:
        if self._kept is None:
            raise ValueError(f"{what}: the engine keeps no prefixes; load it with EngineConfig(prefix_cache='exact')")
        return self._kept
