"""Sampling defaults that a checkpoint ships in `generation_config.json`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_jax.files import read_object

# Keys that change no answer here: provenance, ids the prompt already contains, what only beams (refused otherwise) or an
# assistant's drafts read, and how another implementation goes about it.
IRRELEVANT = frozenset(
    {"_from_model_config", "transformers_version", "bos_token_id", "decoder_start_token_id", "trust_remote_code", "chat_format"}
    | {"use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"}
    | {"compile_config", "disable_compile", "continuous_batching_config", "return_dict_in_generate"}
    | {"output_attentions", "output_hidden_states", "output_scores", "output_logits"}
    | {"early_stopping", "length_penalty", "diversity_penalty", "renormalize_logits"}
    | {"use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"}
    | {"assistant_early_exit", "assistant_lookbehind", "assistant_ensemble_weight", "target_lookbehind", "speculation_type"}
    | {"prompt_lookup_num_tokens", "max_matching_ngram_size"}
)
# Keys that would change an answer and have no counterpart, in a note instead of a refusal because files often have them.
NOTED = {"max_length": "an answer ends after max_new_tokens or at the end of the context"}
# Keys of methods this engine does not have, with the values at which they do nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "top_h": (1.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "force_words_ids": ([],),
    "constraints": ([],),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults for requests that do not choose themselves.

    Without the file: plain sampling, that is temperature 1 with every filter off, and EOS from `config.json`. A key
    missing in the file has the same default.

    do_sample: false means greedy, whatever the temperature. temperature: 0..100, 0 is greedy. top_k: 0 is off.
    top_p: 0..1, 1 is off. min_p: 0..1, 0 is off. repetition_penalty: 0.001..1000, 1 is off. presence_penalty,
    frequency_penalty: -100..100, 0 is off. max_new_tokens: at least 1; None goes on to the end of the context.
    stop: `stop_strings`. eos_ids: ids that end generation, at least one where an EOS is needed. pad_id: None if the checkpoint
    names none. notes: a line for every key that would change an answer elsewhere and does not here.
    """

    eos_ids: tuple[int, ...]
    pad_id: int | None = None
    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def effective_temperature(self) -> float:
        """Temperature with `do_sample: false` taken into account: 0 is greedy."""
        return self.temperature if self.do_sample else 0.0

    @property
    def sampling(self) -> dict[str, Any]:
        """The defaults as keyword arguments of `SamplingParams`, whose ranges they keep."""
        names = "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_new_tokens", "stop"
        return {"temperature": self.effective_temperature} | {name: getattr(self, name) for name in names}

    @classmethod
    def from_dir(cls, path: str | Path, needs_eos: bool = True) -> "GenerationDefaults":
        """Reads `generation_config.json`, and `config.json` for ids it does not name.

        ValueError names the file and the key if a value is out of range, if a key asks for something this engine
        cannot do, or if no EOS id is named anywhere and one is needed.
        """
        folder = Path(path)
        file = folder / "generation_config.json"
        given = {key: value for key, value in read_object(file).items() if value is not None}
        noted = [(key, why) for key, why in NOTED.items() if key in given]
        for key, value in given.items():
            if not (key in IRRELEVANT or key in NOTED or key in _FIELDS or value in NEUTRAL.get(key, ())):
                raise ValueError(f"{file}: {key}={value!r} is not supported; remove it, or set the sampling per request")
        fields: dict[str, Any] = {"notes": tuple(f"{file.name}: {key}={given[key]!r} is not used: {why}" for key, why in noted)}
        for key, (name, parse, allowed) in _FIELDS.items():
            if key in given:
                fields[name] = parse(given[key])
                if fields[name] is None:
                    raise ValueError(f"{file}: {key}={given[key]!r}, allowed is {allowed}")
        config_file = folder / "config.json"
        config = read_object(config_file)
        # Checkpoints with a vision part keep the language model's ids one level down.
        text_config = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
        for key in ("eos_token_id", "pad_token_id"):
            name, parse, allowed = _FIELDS[key]
            value = config.get(key) if config.get(key) is not None else text_config.get(key)
            if name not in fields and value is not None:
                fields[name] = parse(value)
                if fields[name] is None:
                    raise ValueError(f"{config_file}: {key}={value!r}, allowed is {allowed}")
        if "eos_ids" not in fields and needs_eos:
            raise ValueError(f"{folder}: neither generation_config.json nor config.json names an eos_token_id")
        fields.setdefault("eos_ids", ())
        return cls(**fields)


def _number(low: float, high: float) -> Callable[[object], float | None]:
    """Parser of a number in low..high; None if it is not one."""

    def parse(value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            return None
        return float(value)

    return parse


def _integer(low: int) -> Callable[[object], int | None]:
    """Parser of an integer from low to the largest of 32 bits; None if it is not one."""
    return lambda value: value if type(value) is int and low <= value < 1 << 31 else None


def _tokens(value: object) -> tuple[int, ...] | None:
    ids: list[Any] = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(ids)) if ids and all(_token(item) is not None for item in ids) else None


def _strings(value: object) -> tuple[str, ...] | None:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        return None
    return tuple(texts)


_token = _integer(0)
# The ranges are those of `SamplingParams`, so that what a file says is refused when it is read.
_FIELDS: dict[str, tuple[str, Callable[[object], Any], str]] = {
    "eos_token_id": ("eos_ids", _tokens, "an id or a list of ids"),
    "pad_token_id": ("pad_id", _token, "an id"),
    "do_sample": ("do_sample", lambda value: value if isinstance(value, bool) else None, "true or false"),
    "temperature": ("temperature", _number(0.0, 100.0), "a number in 0..100"),
    "top_k": ("top_k", _integer(0), "an integer >= 0 (0 is off)"),
    "top_p": ("top_p", _number(0.0, 1.0), "a number in 0..1"),
    "min_p": ("min_p", _number(0.0, 1.0), "a number in 0..1"),
    "repetition_penalty": ("repetition_penalty", _number(1e-3, 1e3), "a number in 0.001..1000"),
    "presence_penalty": ("presence_penalty", _number(-100.0, 100.0), "a number in -100..100"),
    "frequency_penalty": ("frequency_penalty", _number(-100.0, 100.0), "a number in -100..100"),
    "max_new_tokens": ("max_new_tokens", _integer(1), "an integer >= 1"),
    "stop_strings": ("stop", _strings, "a text or a list of texts"),
}
