"""One run of a cell: which seconds and which tokens go where, under a clock that only programs move."""

from __future__ import annotations

import types
from dataclasses import asdict

import numpy as np
import pytest

from ninfer_jax import SamplingParams
from ninfer_jax.bench import device
from ninfer_jax.bench import measure as measuring
from ninfer_jax.bench.matrix import Cell
from ninfer_jax.engine import sequence

SECONDS = {"admit": 0.5, "prefill": 1.0, "begin": 0.25, "decode_round": 0.125}


def ids(engine, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, engine.tokenizer.vocab_size, count).tolist()


def by_generate(engine, texts, gen: int) -> list:
    """Statistics of the completions that `Engine.generate` gives for the same prompts, one after another."""
    params = SamplingParams(temperature=0, max_new_tokens=gen, ignore_eos=True)
    return [engine.generate(text, params).stats for text in texts]


@pytest.fixture
def clock(monkeypatch, engine):
    """Replaces the clock of the sequences and of the measurement: each program takes the seconds above, all else none, and
    no round is started before it is needed. Holds the time now in its only element."""
    now = [100.0]
    fake = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(measuring, "time", fake)
    monkeypatch.setattr(sequence, "time", fake)
    monkeypatch.setattr(engine.runner, "look_ahead", False)
    for name, seconds in SECONDS.items():
        own = getattr(engine.programs, name)

        def timed(*arguments, own=own, seconds=seconds):
            now[0] += seconds
            return own(*arguments)

        monkeypatch.setattr(engine.programs, name, timed)
    return now


def test_times_of_one_slot(engine, clock):
    texts = [ids(engine, 228, 1)]
    (stats,) = by_generate(engine, texts, 12)
    sample = measuring.measure(
        engine, Cell(prompt=100, gen=12, depth=128, kv="f32", draft=3, slots=1), texts, energy=lambda: clock[0] * 40
    )
    assert asdict(sample) == dict(
        prefill_tokens=100,
        prefill_s=2 * 1.0 + 0.25,
        fill_s=2 * 1.0,
        ttft_s=0.5 + 2 * 1.0 + 0.25,
        decode_tokens=11,
        decode_s=stats.rounds * 0.125,
        rounds=stats.rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        energy_j=stats.rounds * 0.125 * 40,
    )
    assert 3 <= stats.rounds <= 11 and engine.runner.busy == 0


def test_without_depth_nothing_is_taken_off(engine, clock):
    sample = measuring.measure(engine, Cell(64, 1, 0, "f32", 3, 1), [ids(engine, 64, 2)])
    assert (sample.fill_s, sample.prefill_s, sample.ttft_s) == (0, 1.25, 1.75)
    assert (sample.decode_tokens, sample.decode_s, sample.rounds, sample.energy_j) == (0, 0, 0, None)


def test_slots_prefill_in_turn_and_decode_together(engine, clock):
    """A slot's own decode_s would hold the prefill of the slot after it; a round takes 1/8 s for both together."""
    texts = [ids(engine, 128, seed) for seed in (3, 4)]
    most = max(stats.rounds for stats in by_generate(engine, texts, 12))
    energy = []
    cell = Cell(prompt=64, gen=12, depth=64, kv="f32", draft=3, slots=2)
    sample = measuring.measure(engine, cell, texts, energy=lambda: energy.append(clock[0]) or clock[0])
    assert (sample.prefill_tokens, sample.prefill_s, sample.fill_s) == (128, 2 * 1.25, 2 * 1.0)
    assert sample.ttft_s == 2 * (0.5 + 1.25)
    assert (sample.decode_tokens, sample.decode_s) == (22, most * 0.125)
    assert sample.energy_j == energy[1] - energy[0] == sample.decode_s


def test_drafts_are_those_of_the_engine(engine):
    texts = [
        engine.tokenizer.encode(text)[:20]
        for text in ("ROMEO.\nWhat lady is that, which doth enrich the hand", "def read(self, size=-1):\n    if size < 0:\n")
    ]
    texts = [text[: min(map(len, texts))] for text in texts]
    sample = measuring.measure(engine, Cell(len(texts[0]), 30, 0, "f32", 3, 2), texts)
    stats = by_generate(engine, texts, 30)
    assert (sample.rounds, sample.drafted, sample.accepted) == tuple(
        sum(getattr(s, f) for s in stats) for f in ("rounds", "drafted", "accepted")
    )
    assert sample.drafted == 3 * sample.rounds and sample.accepted > 0


def test_texts_have_to_be_those_of_the_cell(engine):
    with pytest.raises(ValueError, match="texts must be 2 of 96 tokens"):
        measuring.measure(engine, Cell(32, 4, 64, "f32", 3, 2), [ids(engine, 96, 8)])


def test_an_interrupted_run_leaves_the_engine_free(engine):
    def stop(done: int, total: int) -> None:
        if done > 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measuring.measure(engine, Cell(100, 20, 0, "f32", 3, 1), [ids(engine, 100, 7)], tell=stop)
    assert engine.runner.busy == 0 and engine.runner.free_tokens == engine.runner.pool_tokens


class Card:
    """A device with statistics like a GPU's, whose peak never falls."""

    platform, local_hardware_id, peak = "gpu", 1, 500

    def memory_stats(self):
        return {"peak_bytes_in_use": self.peak}


def test_versions_tell_sources_apart(monkeypatch, tmp_path):
    """Of the engine; the bench's own and the command line do not count."""
    package = types.ModuleType("pallas_kernels")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(device.sys.modules, "pallas_kernels", package)
    (tmp_path / "bench").mkdir()
    file, own = tmp_path / "a.py", tmp_path / "bench/b.py"
    file.write_text("1")
    own.write_text("1")
    first = device._source()
    own.write_text("2")
    assert device._source() == first
    file.write_text("2")
    assert device._source() != first


def test_a_fingerprint_tells_models_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"12345")
    assert device.fingerprint(tmp_path / "a") == device.fingerprint(tmp_path / "b")
    (tmp_path / "b/model.safetensors").write_bytes(b"123456")
    assert device.fingerprint(tmp_path / "a") != device.fingerprint(tmp_path / "b")


def test_a_peak_that_did_not_rise_is_not_a_number():
    card = Card()
    meter = device.PeakMemory(card)
    assert meter.read() == device.Memory(None, "device peak")
    card.peak = 800
    assert meter.read() == device.Memory(800, "device peak")
    meter.restart()
    assert meter.read() == device.Memory(None, "device peak")


def test_the_process_peak_counts_from_the_restart():
    import jax

    meter = device.PeakMemory(jax.devices("cpu")[0])
    block = np.ones(2**27, np.uint8)
    first = meter.read()
    assert first.what == "process peak RSS" and first.bytes > 2**27
    del block
    meter.restart()
    assert first.bytes - meter.read().bytes > 2**26


@pytest.fixture
def nvml(monkeypatch):
    """A pynvml of two cards that have taken 7 and 9 kJ; `nvml.count` may be changed."""
    module = types.ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.count = 2
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetCount = lambda: module.count
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetHandleByUUID = {"GPU-a": 0, "GPU-b": 1}.__getitem__
    module.nvmlDeviceGetTotalEnergyConsumption = [7_000_000, 9_000_000].__getitem__
    monkeypatch.setitem(device.sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return module


def test_energy_of_the_right_card(nvml, monkeypatch):
    assert device.energy_meter(Card()) is None  # which of two is unknown
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert device.energy_meter(Card())() == 9000
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert device.energy_meter(Card())() == 7000
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert device.energy_meter(Card())() == 9000
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvml.count = 1
    assert device.energy_meter(Card())() == 7000


def test_no_energy_without_an_answer(nvml, monkeypatch):
    def fail():
        raise nvml.NVMLError

    nvml.nvmlInit = fail
    assert device.energy_meter(Card()) is None
    monkeypatch.setitem(device.sys.modules, "pynvml", None)
    assert device.energy_meter(Card()) is None
