"""The tokenizer of the bundled model: 991 byte-level BPE tokens learned from the training split, then 33 control tokens.

Same normaliser, pre-tokenizer and control tokens (in the same order) as the Qwen3.8 tokenizer, so every code path of
the engine that knows these tokens is exercised; only the number of learned tokens is smaller.

    python weights/training/tiny_tokenizer.py          # writes tokenizer.json and tokenizer_config.json into weights/tiny
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tiny_corpus import Document, build_corpus
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TINY_DIR = Path(__file__).resolve().parent.parent / "tiny"
VOCAB_SIZE = 1024
# Words keep one leading blank, digits stand alone, runs of blanks keep their last blank for the next word.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
]
# Control tokens that belong to the text of an answer: decoding with skip_special_tokens keeps them.
KEPT_WHEN_SKIPPING = {
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the byte-level BPE on `texts`; ids 0..990 are learned (all 256 bytes among them), 991..1023 control."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=t not in KEPT_WHEN_SKIPPING) for t in CONTROL_TOKENS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"tokenizer: {tokenizer.get_vocab_size()} tokens, expected {VOCAB_SIZE}; is the corpus empty?")
    return tokenizer


def load_tokenizer(directory: Path = TINY_DIR) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def encode_split(documents: list[Document], tokenizer: Tokenizer | None = None) -> np.ndarray:
    """All documents as one `uint16[tokens]` stream, each followed by `<|endoftext|>`."""
    tokenizer = tokenizer or load_tokenizer()
    end = tokenizer.token_to_id("<|endoftext|>")
    parts = [encoding.ids + [end] for encoding in tokenizer.encode_batch_fast([d.text for d in documents])]
    return np.concatenate([np.asarray(part, np.uint16) for part in parts])


def main() -> None:
    corpus = build_corpus()
    tokenizer = train_tokenizer(document.text for document in corpus.train)
    TINY_DIR.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(TINY_DIR / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    (TINY_DIR / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    for name, split in (("train", corpus.train), ("held-out", corpus.heldout)):
        for kind in ("play", "code"):
            documents = [d for d in split if d.kind == kind]
            size = sum(len(d.text.encode()) for d in documents)
            tokens = len(encode_split(documents, tokenizer)) - len(documents)
            print(f"{name:9s}{kind:5s}{size:9d} bytes {tokens:8d} tokens {size / tokens:.3f} bytes per token")


if __name__ == "__main__":
    main()
