"""Cells and their order, and the text that prompts are cut from."""

from __future__ import annotations
import __future__

import itertools
from pathlib import Path

import pytest

from ninfer_jax.bench.corpus import Corpus, open_corpus, standard_library_texts
from ninfer_jax.bench.matrix import by_engine, cells
from ninfer_jax.checkpoints import tiny_path
from ninfer_jax.text import Tokenizer

LISTS = dict(
    prompts=[64, 128], gens=[8], depths=[0, 256], kvs=["f32", "rk4v4"], drafts=[0, 2], slots=[1], contexts=[None], chunk=64
)


def quiet(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(tiny_path())


def test_every_combination_once():
    found = cells(**LISTS | {"prompts": [64, 128, 64]})
    assert len(found) == len(set(found)) == 2 * 1 * 2 * 2 * 2
    assert {(c.prompt, c.gen, c.depth, c.kv, c.draft, c.slots, c.context) for c in found} == {
        (p, 8, d, kv, k, 1, None) for p in (64, 128) for d in (0, 256) for kv in ("f32", "rk4v4") for k in (0, 2)
    }


def test_one_engine_a_group_sized_to_its_largest_cell_and_cheap_ones_first():
    found = cells(**LISTS | {"contexts": [None, 4096]})
    groups = by_engine(found, lambda g: g.capacity * {"f32": 16, "rk4v4": 3}[g.kv] + g.draft)
    assert [(g.kv, g.draft, g.capacity) for g in groups] == [
        ("rk4v4", 0, 392),
        ("rk4v4", 2, 392),
        ("f32", 0, 392),
        ("f32", 2, 392),
        ("rk4v4", 0, 4096),
        ("rk4v4", 2, 4096),
        ("f32", 0, 4096),
        ("f32", 2, 4096),
    ]
    assert sorted(str(c) for g in groups for c in g.cells) == sorted(map(str, found))
    assert [(c.depth, c.prompt) for c in groups[0].cells] == [(0, 64), (0, 128), (256, 64), (256, 128)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts": [64, 0]}, "prompt is 0, it must be at least 1"),
        ({"gens": [0]}, "gen is 0, it must be at least 1"),
        ({"depths": [-64]}, "depth is -64, it must be at least 0"),
        ({"depths": [100]}, "depth is 100, it must be a multiple of the prefill chunk 64; the nearest is 128"),
        ({"drafts": [6]}, "draft is 6, it must be from 0 to 5"),
        ({"slots": [5]}, "slots is 5, it must be from 1 to 4"),
        ({"kvs": ["rk4v5"]}, "rk4v5"),
        ({"contexts": [300_000]}, "context is 300000"),
    ],
)
def test_a_mistake_names_the_field(change, words):
    with pytest.raises(ValueError, match=words) as caught:
        cells(**LISTS | change)
    assert "\n" not in str(caught.value)


def test_prompts_are_neighbours_in_the_text_and_share_nothing(tokenizer, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i} of a text\n" for i in range(200)), "utf-8")
    corpus = open_corpus(tokenizer, file, 1, quiet)
    texts = corpus.texts(runs=3, slots=2, length=50)
    assert [len(run) for run in texts] == [2, 2, 2] and all(len(t) == 50 for run in texts for t in run)
    together = tokenizer.decode([token for run in texts for text in run for token in text])
    assert len(together) > 100 and file.read_text("utf-8").startswith(together)
    assert corpus.name.startswith("text.txt (sha256 ")


def test_a_short_text_says_how_many_tokens_are_needed(tokenizer, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("ROMEO.\n" * 9, "utf-8")
    corpus = open_corpus(tokenizer, file, 1000, quiet)
    with pytest.raises(
        ValueError, match=rf"corpus: 24,000 tokens are needed \(6 runs x 4 slots x 1,000\), short.txt .* has {len(corpus.ids)};"
    ):
        corpus.texts(6, 4, 1000)
    assert corpus.texts(1, 1, len(corpus.ids)) == [[corpus.ids]]


def test_files_that_are_no_text(tokenizer, tmp_path):
    (tmp_path / "b").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="b: not UTF-8 .byte 3"):
        open_corpus(tokenizer, tmp_path / "b", 1, quiet)
    with pytest.raises(ValueError, match="gone: No such file"):
        open_corpus(tokenizer, tmp_path / "gone", 1, quiet)


def test_the_standard_library_is_there_without_its_tests(tokenizer):
    names = [name for name, _ in itertools.islice(standard_library_texts(), 400)]
    assert {"abc.py", "argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert names == sorted(names, key=lambda name: ("/" in name, name))
    assert not {Path(name).parts[0] for name in names} & {"test", "site-packages", "encodings"}
    corpus = open_corpus(tokenizer, None, 20_000, quiet)
    assert 20_000 <= len(corpus.ids) < 200_000
    assert Path(__future__.__file__).read_text("utf-8") in tokenizer.decode(corpus.ids)
    assert len({tuple(t) for (t,) in Corpus("x", corpus.ids).texts(100, 1, 200)}) == 100
