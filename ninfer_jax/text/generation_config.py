"""Sampling defaults that a checkpoint ships in `generation_config.json`."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Keys that say nothing about which token is sampled: provenance, ids the prompt already contains, lengths (the
# request decides), and switches of other implementations.
IGNORED = frozenset(
    {"_from_model_config", "transformers_version", "bos_token_id", "decoder_start_token_id", "max_length"}
    | {"max_new_tokens", "use_cache", "cache_implementation", "return_dict_in_generate", "output_attentions"}
    | {"output_hidden_states", "output_scores", "output_logits", "trust_remote_code", "chat_format"}
)
# Keys of methods this engine does not have, with the values at which they do nothing.
NEUTRAL: dict[str, object] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "early_stopping": False,
    "renormalize_logits": False,
    "remove_invalid_values": False,
}


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults for requests that do not choose themselves.

    Without the file: plain sampling, that is temperature 1 with every filter off, and EOS from `config.json`. A key
    missing in the file has the same default.

    do_sample: false means greedy, whatever the temperature. temperature: >= 0, 0 is greedy. top_k: 0 is off.
    top_p: 0..1, 1 is off. min_p: 0..1, 0 is off. repetition_penalty: > 0, 1 is off.
    eos_ids: ids that end generation, at least one. pad_id: None if the checkpoint names none.
    """

    eos_ids: tuple[int, ...]
    pad_id: int | None = None
    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def effective_temperature(self) -> float:
        """Temperature with `do_sample: false` taken into account: 0 is greedy."""
        return self.temperature if self.do_sample else 0.0

    @classmethod
    def from_dir(cls, path: str | Path) -> "GenerationDefaults":
        """Reads `generation_config.json`, and `config.json` for ids it does not name.

        ValueError names the file and the key if a value is out of range, if a key asks for something this engine
        cannot do, or if no EOS id is named anywhere.
        """
        folder = Path(path)
        file = folder / "generation_config.json"
        given = {key: value for key, value in _read(file).items() if value is not None}
        for key, value in given.items():
            if key in IGNORED or key in _FIELDS or (key in NEUTRAL and value == NEUTRAL[key]):
                continue
            raise ValueError(f"{file}: {key}={value!r} is not supported; remove it, or set the sampling per request")
        fields = {}
        for key, (name, parse, allowed) in _FIELDS.items():
            if key in given:
                fields[name] = parse(given[key])
                if fields[name] is None:
                    raise ValueError(f"{file}: {key}={given[key]!r}, allowed is {allowed}")
        config_file = folder / "config.json"
        config = _read(config_file)
        # Checkpoints with a vision part keep the language model's ids one level down.
        text_config = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
        for key in ("eos_token_id", "pad_token_id"):
            name, parse, allowed = _FIELDS[key]
            value = config.get(key) if config.get(key) is not None else text_config.get(key)
            if name not in fields and value is not None:
                fields[name] = parse(value)
                if fields[name] is None:
                    raise ValueError(f"{config_file}: {key}={value!r}, allowed is {allowed}")
        if "eos_ids" not in fields:
            raise ValueError(f"{folder}: neither generation_config.json nor config.json names an eos_token_id")
        return cls(**fields)


def _read(file: Path) -> dict:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must be a JSON object")
    return content


def _number(low: float, high: float = math.inf, above: bool = False) -> Callable[[object], float | None]:
    """Parser of a finite number in low..high (low itself excluded if `above`); None if it is not one."""

    def parse(value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        return float(value) if low <= value <= high and not (above and value == low) else None

    return parse


def _token(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _tokens(value: object) -> tuple[int, ...] | None:
    ids = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(ids)) if ids and all(_token(item) is not None for item in ids) else None


_FIELDS = {
    "eos_token_id": ("eos_ids", _tokens, "an id or a list of ids"),
    "pad_token_id": ("pad_id", _token, "an id"),
    "do_sample": ("do_sample", lambda value: value if isinstance(value, bool) else None, "true or false"),
    "temperature": ("temperature", _number(0.0), "a number >= 0"),
    "top_k": ("top_k", _token, "an integer >= 0 (0 is off)"),
    "top_p": ("top_p", _number(0.0, 1.0), "a number in 0..1"),
    "min_p": ("min_p", _number(0.0, 1.0), "a number in 0..1"),
    "repetition_penalty": ("repetition_penalty", _number(0.0, above=True), "a number > 0"),
}
