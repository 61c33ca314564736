"""What is found in the texts of machines that have something the matter."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ninfer_jax.doctor import FINE, NOTE, WRONG, Inputs, judge_card, judge_host, read, report
from ninfer_jax.doctor.card import parse_cards, parse_processes
from ninfer_jax.doctor.inputs import Folder

# As nvidia-smi 550 prints it on a machine with a display, and on WSL, which does not know everything.
CARD = "0, NVIDIA GeForce RTX 4090, GPU-1, 550.54.14, 24564, 1043, 23050, Disabled, Enabled, 450.00, 450.00, 4, 16, 16, 41\n"
WSL = "0, NVIDIA GeForce RTX 4090, GPU-1, 551.86, 24564, 1500, 22700, Enabled, [N/A], [N/A], [N/A], 4, 16, 16, 50\n"
INTEL = "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: sse4_2 avx2 fma f16c bmi2\n\nprocessor\t: 1\n"
GOOD = Inputs(
    versions={"ninfer-jax": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.2"},
    python="3.11.7",
    system="Linux x86_64",
    kernel="6.8",
    cpuinfo=INTEL,
    meminfo="MemTotal:       65536000 kB\n",
    cores=8,
    uid=1000,
    environment={},
    cards=CARD,
    processes="",
    free_disk=1 << 40,
    read_rate=2e9,
    available=48 << 30,
)


def judged(**fields):
    """Findings that are not fine: name -> (status, text, advice)."""
    inputs = replace(GOOD, **fields)
    found = [*judge_host(inputs), *judge_card(inputs)]
    assert all(f.advice for f in found if f.status != FINE)
    return {f.name: (f.status, f.text, f.advice) for f in found if f.status != FINE}


def test_a_good_machine_has_nothing_to_mend():
    assert judged() == {}


def test_what_nvidia_smi_does_not_know_is_not_guessed():
    (card,) = parse_cards(WSL)
    assert card.power is None and card.persistence is None and card.total == 24564 << 20 and card.display is True
    assert set(judged(cards=WSL, wsl=True)) == {"WSL", "card 0: display"}
    assert parse_processes("GPU-1, 77, 812\nGPU-1, 78, [N/A]\nNo running processes\n") == [
        ("GPU-1", 77, 812 << 20),
        ("GPU-1", 78, None),
    ]


@pytest.mark.parametrize(
    ("fields", "name", "status", "says"),
    [
        (dict(cards=CARD.replace("550.54.14", "470.1")), "driver", WRONG, "525 or newer"),
        (dict(versions=GOOD.versions | {"jax-cuda13-plugin": "0.10.2"}), "driver", WRONG, "pip uninstall jax-cuda13-plugin"),
        (dict(versions={"jax": "0.10.2", "jaxlib": "0.10.2"}), "driver", WRONG, "pip install 'ninfer-jax[cuda12]'"),
        (dict(versions=GOOD.versions | {"jax-cuda12-plugin": "0.9.0"}), "driver", WRONG, "'jax-cuda12-plugin==0.10.2'"),
        (
            dict(versions={"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2"}),
            "driver",
            WRONG,
            "needs driver 580 or newer",
        ),
        (dict(versions=GOOD.versions | {"jaxlib": "0.10.1"}), "versions", WRONG, "jaxlib==0.10.2"),
        (dict(cards="", smi_error="Driver/library version mismatch"), "card", WRONG, "restart the machine"),
        (dict(cards=None), "card", NOTE, "no driver answers"),
        (dict(cards="0, half a line\n"), "card", NOTE, "not understood"),
        (dict(cards=CARD.replace("23050", "9000")), "card 0: memory", NOTE, "nvidia-smi"),
        (
            dict(cards=CARD.replace("23050", "9000"), processes="GPU-1, 77, 14000\nGPU-2, 78, 99\n"),
            "card 0: memory",
            NOTE,
            "process 77 (13.7 GiB)",
        ),
        (dict(cards=CARD.replace("Disabled, Enabled", "Enabled, Enabled")), "card 0: display", NOTE, "--context"),
        (dict(cards=CARD.replace("Disabled, Enabled", "Disabled, Disabled")), "card 0: persistence", NOTE, "nvidia-smi -pm 1"),
        (dict(cards=CARD.replace("450.00, 450.00", "300.00, 450.00")), "card 0: power", NOTE, "-pl 450"),
        (dict(cards=CARD.replace("4, 16, 16", "4, 4, 16")), "card 0: PCIe", NOTE, "another slot"),
        (dict(cards=CARD + CARD.replace("0, NV", "1, NV").replace("GPU-1", "GPU-2")), "cards", NOTE, "CUDA_VISIBLE_DEVICES"),
        (dict(available=1 << 30), "memory", NOTE, "control group"),
        (dict(available=None), "memory", NOTE, "not be refused"),
        (dict(free_disk=1 << 20), "disk", NOTE, "XDG_CACHE_HOME"),
        (dict(read_rate=100e6), "disk", NOTE, "160 s"),
        (dict(kernels_error="no AVX2"), "processor", WRONG, "--kernels xla"),
        (dict(environment={"XLA_FLAGS": "--x"}), "XLA_FLAGS", NOTE, "unset XLA_FLAGS"),
        (dict(environment={"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}), "LD_LIBRARY_PATH", NOTE, "unset"),
    ],
)
def test_each_thing_that_is_the_matter_is_found_alone_with_what_to_do(fields, name, status, says):
    found = judged(**fields)
    assert list(found) == [name] and found[name][0] == status
    assert says in " ".join(found[name][1:])


@pytest.mark.parametrize(("mode", "uid", "says"), [(0o777, 1000, "chmod go-w"), (0o700, 0, "remove it"), (0o700, 1000, None)])
def test_folders_that_others_can_write_are_wrong(mode, uid, says):
    found = judged(folders=(Folder("programs", Path("/home/a/.cache/ninfer_jax/programs"), uid, mode, 5),))
    assert [says in advice for _, _, advice in found.values()] == ([] if says is None else [True])


def test_a_report_has_neither_paths_nor_what_the_environment_says():
    inputs = replace(
        GOOD,
        cards="",
        smi_error="failed in /usr/lib/secret",
        environment={"XLA_FLAGS": "--dump_to=/home/ann", "LD_LIBRARY_PATH": "/opt/cuda"},
        folders=(Folder("programs", Path("/home/ann/.cache/ninfer_jax/programs"), 0, 0o777, 5),),
        kernels_error="no room in /tmp/x",
    )
    text = report([*judge_host(inputs), *judge_card(inputs)])
    assert "/" not in text.replace("ninfer-jax", "") and "ann" not in text and "dump" not in text
    assert "jax 0.10.2" in text and "wrong kept files: programs" in text and "XLA_FLAGS" in text


def test_this_machine_is_read_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ninfer_jax" / "cpu").mkdir(parents=True, mode=0o700)
    (tmp_path / "ninfer_jax" / "cpu" / "a").write_bytes(bytes(10))
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncase $1 in *gpu=*) echo '{CARD.strip()}';; *) echo 'GPU-1, 7, 20';; esac\n")
    smi.chmod(0o755)
    inputs = read()
    assert inputs.cards == CARD and inputs.processes == "GPU-1, 7, 20\n" and inputs.uid == os.getuid()
    assert [(f.name, f.bytes) for f in inputs.folders] == [("all", 10), ("cpu", 10)]
    assert inputs.read_rate and inputs.free_disk and inputs.versions["jax"] and "processor" in inputs.cpuinfo
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ninfer_jax", "nvidia-smi"]  # nothing of the probe is left
    smi.write_text("#!/bin/sh\necho NVML: Driver/library version mismatch >&2; exit 18\n")
    assert read(measure_disk=False).smi_error == "NVML: Driver/library version mismatch"
