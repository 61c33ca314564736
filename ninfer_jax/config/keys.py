"""Keys of a config.json that matter: the rule by which `ModelConfig` reads one, passes it over, or refuses it by its name.

A key is of the first kind that fits:

1. read: the engine takes its value.
2. variant: it selects one of several computations and must hold a value that the engine implements.
3. irrelevant: known to change nothing in a forward pass. Bookkeeping of transformers, token ids (`*_token_id`), what only
   training and sampling use (`*_dropout`, `num_beams`), the other towers' configs.
4. provenance: unknown, but it says where the file comes from: its name begins with "_" or with the name of a tool that writes
   checkpoints, or has a word of bookkeeping in it (author, date, license, version, ...), has no word of an architecture in it
   (attention, rope, scale, ...), and its value holds no number but a version, a date or a seed. It is left unread, with a note.

Everything else is refused: a key that nobody here has heard of may well be another architecture, above all one with a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

_IRRELEVANT = frozenset(
    [
        "architectures",
        "base_model",
        "base_model_name_or_path",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "language_model_only",
        "max_window_layers",
        "model_name",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "prefix",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "text_config",
        "tf_legacy_loss",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "use_bfloat16",
        "use_cache",
        "vision_config",
        "_name_or_path",
        "name_or_path",
        # which kernels computed it
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_experts_implementation",
        "attn_implementation",
        # settings of sampling, which older versions of transformers kept here; they have a file of their own
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ]
)
_IRRELEVANT_ENDS = ("_token_id", "_token_ids", "_token_index", "_dropout", "_pdrop")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TOOLS = _words(
    "autoawq autogptq autoround autotrain axolotl gptqmodel hf huggingface llamafactory llmcompressor mergekit modelscope optimum "
    "swift trl unsloth"
)
_BOOKKEEPING = _words(
    "author authors by changelog comment comments commit contact copyright created creator credits dataset datasets date "
    "description doc docs finetune finetuned hash homepage language languages library licence license link merged note notes "
    "organization origin parent producer provenance publisher readme release released repo repository revision seed sha sha256 "
    "source sources tags timestamp title updated uploaded uploader uri url version website"
)
_COUNTED = _words("created date hash release seed timestamp updated version")  # whose value may be a number
_ARCHITECTURE = _words(
    "act activation activations adapter adapters alibi alpha attention attn beta bias block blocks cache causal channel channels "
    "chunk clip compress compression conv convolution cross decay decoder delta depth dilation dim dims dimension dtype embed "
    "embedding embeddings encoder eps epsilon expert experts factor ffn freq frequency function gate gated gating gdn groups head "
    "heads hidden inner intermediate interval kernel key keys kv latent layer layers len length linear logit logits lora mamba "
    "mask memory mixer mla mlp modulation moe mrope multiplier ngram norm normalization norms offset output pattern permutation "
    "pool position positional positions proj projection qk qkv quant quantization query rank ratio recurrent rescale residual "
    "residuals rms rope rotary rotation router routing scale scales scaling shared shift size sizes sliding softcap softcapping "
    "softmax sparse sparsity ssm state states stride theta threshold tie tied topk transform value values vocab vocabulary width "
    "window windows"
)


def sort_keys(
    keys: Mapping[str, Any],
    *,
    read: Collection[str],
    variants: Mapping[str, tuple[Any, ...]],
    path: str = "",
    irrelevant: Callable[[str], bool] | None = None,
) -> list[str]:
    """Notes on the keys that are left unread for their provenance (kind 4), in the order of the file.

    path: what goes before a key's name in messages, "rope_parameters." for instance. irrelevant: tells kind 3, by default as
    for a config.json. Raises ValueError for a variant that is not implemented and for a key of no kind.
    """
    notes = []
    for key, value in keys.items():
        if key in read or (irrelevant or is_irrelevant)(key):
            continue
        if key in variants:
            if value not in variants[key]:
                hint = "; convert the checkpoint first" if key == "quantization_config" else ""
                raise ValueError(f"config.json: {path}{key} is {value!r}, implemented: {', '.join(map(repr, variants[key]))}{hint}")
        elif is_provenance(key, value):
            notes.append(f"config.json: {path}{key} ({value!r:.80}) says where the file comes from and is left unread")
        else:
            raise ValueError(f"config.json: key {path + key!r} (value {value!r:.200}) is not known to this engine")
    return notes


def is_irrelevant(key: str) -> bool:
    """Whether a key of a config.json is known to change nothing in a forward pass."""
    return key in _IRRELEVANT or key.endswith(_IRRELEVANT_ENDS)


def is_provenance(key: str, value: object) -> bool:
    """Whether an unknown key says where a file comes from and nothing about what is computed (kind 4 of the rule above)."""
    words = [word for word in re.split(r"[^a-z0-9]+", key.lower()) if word]
    if not words or _ARCHITECTURE.intersection(words):
        return False
    named = key.startswith("_") or words[0] in _TOOLS or not _BOOKKEEPING.isdisjoint(words)
    return named and (not _COUNTED.isdisjoint(words) or not _holds_number(value))


def _holds_number(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_number(v) for v in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_number(v) for v in value)
    return isinstance(value, int | float) and not isinstance(value, bool)
