"""Microseconds of processor time: masks, and what a grammar forces, with the real tokenizer. python benchmarks/grammar_masks.py"""

import tempfile
import time
from pathlib import Path

import numpy as np

from ninfer_jax.checkpoints.qwen_tokenizer import build
from ninfer_jax.text import Tokenizer, grammar
from ninfer_jax.text.grammar import Grammars

ROWS, DRAFTS = 248_320, 15
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TEXT = '{"name": "Ada Lovelace, countess", "age": 36, "tags": ["mathematics", "engines", "poetry"]}'


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = Tokenizer.from_dir(build(Path(directory) / "tokenizer", "3.8").parent)
    start = time.thread_time()
    grammars = Grammars(tokenizer, ROWS, tokenizer.eos_ids())
    print(f"Grammars: {time.thread_time() - start:.2f} s")
    ids = tokenizer.encode(TEXT)
    for drafts in (0, 3, DRAFTS):
        matcher, rows, masks, forced = (
            grammars.matcher(grammar.json_schema(SCHEMA)),
            np.zeros((drafts + 1, grammars.words), np.uint32),
            [],
            [],
        )
        for at in range(len(ids) - drafts):
            start = time.thread_time()
            found = matcher.guided(ids[at : at + drafts])
            forced.append((time.thread_time() - start) * 1e6)
            start = time.thread_time()
            filled = matcher.mask(found, rows)
            masks.append((time.thread_time() - start) * 1e6)
            assert filled == drafts + 1 and matcher.accept(ids[at : at + 1]) == 1
        for name, times in (("masks", masks), ("forced drafts", forced)):
            print(f"{drafts + 1} rows, {name}: median {np.median(times):.0f} us, most {max(times):.0f} us")


if __name__ == "__main__":
    main()
