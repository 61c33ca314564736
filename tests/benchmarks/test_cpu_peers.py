"""`benchmarks/cpu_peers.py` in miniature: what it asks of the peers, what it refuses, what it writes."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import FUNCTIONAL

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import cpu_peers  # noqa: E402
import peer_report  # noqa: E402
from cpu_peers import Length, capacity, compare, lengths, measure, parse  # noqa: E402
from peer_formats import int4, multimodal_twin, q8_0, stands_for  # noqa: E402
from random_checkpoint import make_checkpoint  # noqa: E402


class Fake:
    """Answers like a peer and notes what it was asked: `rate` tokens a second at everything, log-probabilities off by `error`."""

    def __init__(self, rate: float = 100.0, error: float = 0.0):
        self.rate, self.error, self.calls = rate, error, []

    def call(self, method: str, *args):
        self.calls.append((method, *(len(a) if isinstance(a, list) else a for a in args)))
        if method == "greedy":
            return list(range(args[1])), [-1.0 + self.error] * args[1]
        if method == "score":
            return [-1.0] * len(args[1])
        return (args[0] if method == "decode" else len(args[0])) / self.rate


def workers(**errors: float) -> dict[str, Fake]:
    names = {"ours": "ninfer-jax", "reference": "transformers", "int4": "onnxruntime int4"}
    return {name: Fake(10.0 * (i + 1), errors.get(key, 0.0)) for i, (key, name) in enumerate(names.items())}


def test_the_whole_matrix_is_the_default_and_quick_is_one_length_of_float32_engines():
    full = parse([])
    assert (full.prefill, full.depths, full.repeats) == ([128, 512, 2048], [16, 2048, 8192], 5)
    assert full.peers == list(cpu_peers.PEERS)
    quick = parse(["--quick", "--only", "llama.cpp", "llama.cpp q8_0"])
    assert (quick.prefill, quick.depths, quick.steps, quick.peers) == (
        [512],
        [512],
        128,
        ["ninfer-jax", "transformers", "llama.cpp"],
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--depths", "16", "-1"], r"--depths is \[16, -1\]"),
        (["--threads", "977"], "--threads is 977"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments, said):
    with pytest.raises(SystemExit, match=said):
        parse(arguments)


def test_a_long_session_is_filled_once_and_a_short_one_in_every_turn():
    matrix = lengths([128, 2048], [16, 2048, 8192], 32)
    assert matrix == [
        Length(16, False, 32, True),
        Length(128, True, 0, True),
        Length(2048, True, 32, True),
        Length(8192, False, 32, False),
    ]
    # Two tokens may come with the prefill, and each of six turns takes 33.
    assert capacity(matrix, repeats=5) == 8192 + 2 + 6 * 33


def test_all_peers_do_the_same_work_in_turns_and_the_first_turn_is_thrown_away(monkeypatch):
    monkeypatch.setattr(cpu_peers, "SETTLE", 0.0)
    peers = workers()
    rates = measure(peers, [Length(8, False, 3, False), Length(24, True, 0, True)], repeats=2, seed=0)
    once = [("prefill", 8), *[("decode", 3)] * 3, *[("prefill", 24)] * 3]
    assert [peer.calls for peer in peers.values()] == [once] * 3
    assert rates["decode"] == {8: {name: [pytest.approx(peer.rate)] * 2 for name, peer in peers.items()}}
    assert rates["prefill"] == {24: {name: [pytest.approx(peer.rate)] * 2 for name, peer in peers.items()}}


def test_nothing_is_timed_when_numbers_differ():
    within = compare(workers(int4=0.3), [1, 2])
    assert within == {"ninfer-jax": 0.0, "transformers": 0.0, "onnxruntime int4": pytest.approx(0.3)}
    with pytest.raises(SystemExit, match="ninfer-jax differs from transformers by 3.0e-04, more than 2e-04: nothing was timed"):
        compare(workers(ours=3e-4), [1, 2])
    with pytest.raises(SystemExit, match="onnxruntime int4 differs .* more than 5e-01"):
        compare(workers(int4=0.6), [1, 2])


def test_a_quantised_peer_is_scored_with_its_own_weights():
    peers = workers()
    compare(peers, [1, 2, 3])
    assert [call for call in peers["transformers"].calls if call[0] == "score"] == [
        ("score", 3, 16, w) for w in ("float32", "float32", "int4")
    ]


def test_quantised_weights_by_their_definitions():
    matrix = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    matrix[1, :32] = 0.0
    for through, code in ((q8_0, _q8_0), (int4, _int4)):
        expected = np.concatenate([code(block) for block in matrix.reshape(-1, 32)]).reshape(matrix.shape)
        np.testing.assert_allclose(through(matrix), expected, rtol=1e-6, atol=1e-7)
    for name in (
        "model.embed_tokens.weight",
        "model.layers.0.linear_attn.in_proj_a.weight",
        "model.layers.0.linear_attn.in_proj_b.weight",
    ):
        assert stands_for(name, matrix, "int4") is matrix
    assert not np.array_equal(stands_for("model.layers.0.linear_attn.in_proj_a.weight", matrix, "q8_0"), matrix)
    with pytest.raises(ValueError, match="weights is 'q2'"):
        stands_for("lm_head.weight", matrix, "q2")


def test_the_multimodal_twin_is_the_same_text_model(tmp_path):
    """transformers reads both and is asked for logits: the text model, and its part of the multimodal one."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5ForConditionalGeneration

    checkpoint = make_checkpoint(tmp_path, 0, "tiny")
    text = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    twin = Qwen3_5ForConditionalGeneration.from_pretrained(multimodal_twin(checkpoint), dtype=torch.float32)
    ids = torch.tensor([[300, 301, 302, 303]])
    with torch.inference_mode():
        ours, theirs = text(ids).logits, twin(ids).logits
    # Two programs of torch's: as far apart as float32 sums of a few hundred terms may be.
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_tables_follow_from_the_rates():
    rates = {
        "prefill": {},
        "decode": {
            16: {"ninfer-jax": [4.0, 5.0, 9.0], "llama.cpp": [10.0, 8.0, 11.0]},
            2048: {"ninfer-jax": [3.0], "llama.cpp": [2.0]},
        },
    }
    assert peer_report.table(rates, "decode") == [
        ["engine", "16", "ours is", "2,048", "ours is"],
        ["ninfer-jax", "5.0 (4.0 to 9.0)", "1.00x", "3.0 (3.0 to 3.0)", "1.00x"],
        ["llama.cpp", "10.0 (8.0 to 11.0)", "0.50x", "2.0 (2.0 to 2.0)", "1.50x"],
    ]


@pytest.mark.long
def test_a_run_of_this_engine_and_transformers(tmp_path):
    """The other engines belong to the extra `bench`; the command, processes and files are the same for them."""
    line = [sys.executable, str(BENCHMARKS / "cpu_peers.py"), "--tiny", "--only", "transformers", "--repeats", "2"]
    line += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out"), "--plot", str(tmp_path / "out.png")]
    done = subprocess.run(line, capture_output=True, text=True, env=FUNCTIONAL, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    rates = {kind: {int(n): values for n, values in found["tokens_per_second"][kind].items()} for kind in ("prefill", "decode")}
    assert (list(rates["prefill"]), list(rates["decode"])) == ([24, 70], [8, 70])
    for values in [*rates["prefill"].values(), *rates["decode"].values()]:
        assert list(values) == ["ninfer-jax", "transformers"]
        assert all(len(v) == 2 and min(v) > 0 for v in values.values())
    assert 0 < found["differences"]["ninfer-jax"] < 2e-4
    written = (tmp_path / "out.md").read_text()
    assert written == peer_report.markdown(rates, found)
    assert f"{statistics.median(rates['decode'][70]['transformers']):.1f} (" in written
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def _q8_0(block: np.ndarray) -> list[float]:
    scale = max(abs(float(x)) for x in block) / 127
    return [float(np.float16(scale)) * round(float(x) / scale) if scale else 0.0 for x in block]


def _int4(block: np.ndarray) -> list[float]:
    largest = max((float(x) for x in block), key=abs)
    if largest == 0:
        return [0.0] * len(block)
    return [min(7, max(-8, round(-8 * float(x) / largest))) * largest / -8 for x in block]
