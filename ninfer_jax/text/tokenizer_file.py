"""The content of a checkpoint's tokenizer files, brought to what encoding needs.

`tokenizer.json` also keeps settings of whoever saved it, which `transformers` sets back before it encodes: `truncation` and
`padding`. BPE dropout, a method of training, is off here as well. For the family's own tokenizer class `transformers`
further replaces the parts that define Qwen3.5's splitting of text, which some requantised repositories ship wrongly;
and flags of added tokens in `tokenizer_config.json` go before those of `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from ninfer_jax.text.control_tokens import AddedToken

# Of `transformers`' Qwen3_5Tokenizer; the checkpoint's own tokenizer.json has the same.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NORMALIZER = {"type": "NFC"}
_MODEL_SWITCHES = {"ignore_merges": False, "fuse_unk": False, "byte_fallback": False, "unk_token": None}
_FLAGS = ("single_word", "lstrip", "rstrip")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True)
class TokenizerFile:
    """model: the tokenizer.json of a tokenizer without added tokens, for the library. vocab: token -> id, added: the added
    tokens. notes: one line for each setting that a reader of the files would expect to count and that does not."""

    model: dict[str, Any]
    vocab: dict[str, int]
    added: tuple[AddedToken, ...]
    notes: tuple[str, ...]

    @property
    def normalises(self) -> bool:
        return self.model["normalizer"] is not None


def read_specification(specification: object, config: Mapping[str, Any], family: bool, source: str) -> TokenizerFile:
    """specification: the parsed tokenizer.json, source: its name in messages; config: the parsed tokenizer_config.json.
    family: whether `transformers` would take its Qwen3_5Tokenizer. ValueError for what cannot be reproduced exactly."""
    if not isinstance(specification, dict) or not isinstance(specification.get("model"), dict):
        raise ValueError(f"{source}: not a tokenizer.json, it has no `model`")
    model, decoder = specification["model"], specification.get("decoder")
    if model.get("type") != "BPE" or not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        raise ValueError(f"{source}: only byte-level BPE is supported, this is model {model.get('type')!r}")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not all(type(token) is int and token >= 0 for token in vocab.values()):
        raise ValueError(f"{source}: model.vocab must map tokens to ids")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ValueError(f"{source}: model.{key} is {model[key]!r}, which byte-level BPE does not have")
    notes: list[str] = []
    plain = specification | {"truncation": None, "padding": None, "added_tokens": [], "post_processor": None}
    plain |= _parts(specification, family, source, notes)
    added = _added_tokens(specification.get("added_tokens") or [], config, vocab, source, notes)
    for key in ("split_special_tokens", "add_prefix_space"):
        if config.get(key):
            notes.append(f"tokenizer_config.json: {key} has no effect here")
    read = TokenizerFile(plain, vocab, added, tuple(notes))
    if read.normalises and plain["normalizer"] != _NORMALIZER and (token := next((t for t in added if t.normalized), None)):
        kind = plain["normalizer"].get("type") if isinstance(plain["normalizer"], dict) else plain["normalizer"]
        raise ValueError(f"{source}: added token {token.content!r} has normalized=true, which goes with NFC, not with {kind}")
    return read


def _parts(specification: dict, family: bool, source: str, notes: list[str]) -> dict[str, Any]:
    """Model, normaliser and pre-tokeniser to use; where they are not Qwen3.5's, `notes` gets a line."""
    model = specification["model"]
    switches = {key: value for key, value in _MODEL_SWITCHES.items() if model.get(key, value) != value}
    normalizer, splitter = specification.get("normalizer"), specification.get("pre_tokenizer")
    other = [f"model.{key}" for key in switches]
    other += ["normalizer"] if normalizer != _NORMALIZER else []
    other += ["pre_tokenizer"] if not _splits_as_qwen(splitter) else []
    if other:
        done = "replaced by it, as transformers does" if family else "taken as the file has it"
        notes.append(f"{source}: {', '.join(other)} other than Qwen3.5's: {done}")
    if family:
        model, normalizer, splitter = model | switches, _NORMALIZER, _QWEN_SPLITTER
    return {"model": model | {"dropout": None}, "normalizer": normalizer, "pre_tokenizer": splitter}


_QWEN_SPLITTER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}


def _splits_as_qwen(splitter: object) -> bool:
    """Whether a pre-tokeniser is Qwen3.5's; `trim_offsets` tells where text came from and changes no id."""
    parts = splitter.get("pretokenizers") if isinstance(splitter, dict) and splitter.get("type") == "Sequence" else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return False
    same = [part | {"trim_offsets": True} if part.get("type") == "ByteLevel" else part for part in parts]
    return same == _QWEN_SPLITTER["pretokenizers"]


def _added_tokens(
    given: object, config: Mapping[str, Any], vocab: Mapping[str, int], source: str, notes: list[str]
) -> tuple[AddedToken, ...]:
    if not isinstance(given, list):
        raise ValueError(f"{source}: added_tokens must be a list")
    tokens: dict[str, dict[str, Any]] = {}
    free = len(vocab)  # the id that the library gives the next added token, whatever a file says
    for index, token in enumerate(given):
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(token, dict) or type(token.get("id")) is not int or not _is_text(content):
            raise ValueError(f"{source}: added_tokens[{index}] needs an id and a content")
        if content in tokens:
            raise ValueError(f"{source}: added token {content!r} is listed twice")
        if token["id"] != (own := vocab.get(content, free)):
            raise ValueError(f"{source}: added token {content!r} has id {token['id']}, the tokenizers library gives it {own}")
        tokens[content], free = token, max(free, own + 1)
    for id_, token in _decoder_of(config).items():
        content = token["content"]
        own = tokens[content]["id"] if content in tokens else vocab.get(content, free)
        if own != int(id_):
            raise ValueError(
                f"tokenizer_config.json: added_tokens_decoder gives {content!r} the id {id_}, by {source} it is {own}: "
                "save the tokenizer again, so that both files agree"
            )
        tokens[content], free = token | {"id": own}, max(free, own + 1)
    special = _named(config)
    for name in special - tokens.keys() - vocab.keys():
        notes.append(f"tokenizer_config.json names the token {name!r}, which {source} lacks: it stays text")
    for content, token in tokens.items():
        for flag in _FLAGS:
            if token.get(flag):
                raise ValueError(f"{source}: added token {content!r} has {flag}=true, which is not supported")
    return tuple(
        AddedToken(token["id"], content, bool(token.get("special")), bool(token.get("normalized")))
        for content, token in tokens.items()
    )


def _decoder_of(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`added_tokens_decoder` of tokenizer_config.json: id as text -> token, in the order of ids."""
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ValueError("tokenizer_config.json: added_tokens_decoder must map ids to tokens")
    for id_, token in decoder.items():
        if not (id_.isascii() and id_.isdigit()) or not isinstance(token, dict) or not _is_text(token.get("content")):
            raise ValueError(f"tokenizer_config.json: added_tokens_decoder[{id_!r}] must be an id with a token that has a content")
    return dict(sorted(decoder.items(), key=lambda entry: int(entry[0])))


def _named(config: Mapping[str, Any]) -> set[str]:
    """The tokens that tokenizer_config.json speaks of by their text alone."""
    lists = [config.get(key) for key in _LISTS]
    given = [config.get(key) for key in _NAMED]
    given += [item for value in lists if isinstance(value, list) for item in value]
    given += [item for value in lists if isinstance(value, dict) for item in value.values()]
    texts = [item.get("content") if isinstance(item, dict) else item for item in given]
    return {text for text in texts if _is_text(text)}


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value != ""
