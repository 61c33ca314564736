"""A limit of the card's power, on a stand-in of NVML: what is set, what is refused and in which words."""

import sys
from types import ModuleType

import pytest

from ninfer_jax.planning.power import limit_power


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """A card of 150 to 450 W, limited to 450."""
    made = ModuleType("pynvml")
    made.limit, made.set, made.cards, made.allowed, made.driver = 450_000, [], 1, True, True

    def start():
        if not made.driver:
            raise NVMLError("Driver Not Loaded")

    def put(card, milliwatts):
        if not made.allowed:
            raise NVMLError("Insufficient Permissions")
        made.set.append((card, milliwatts))

    made.NVMLError, made.nvmlInit = NVMLError, start
    made.nvmlDeviceGetCount = lambda: made.cards
    made.nvmlDeviceGetHandleByIndex = lambda index: index
    made.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    made.nvmlDeviceGetPowerManagementLimitConstraints = lambda card: (150_000, 450_000)
    made.nvmlDeviceGetPowerManagementLimit = lambda card: made.limit
    made.nvmlDeviceSetPowerManagementLimit = put
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_the_limit_is_set_once(nvml):
    limit_power(300, {})
    assert nvml.set == [(0, 300_000)]
    nvml.limit = 300_000
    nvml.allowed = False
    limit_power(300, {})  # it holds already: nobody has to be root for that


def test_which_of_several_cards(nvml):
    nvml.cards = 2
    with pytest.raises(ValueError, match="which of several cards"):
        limit_power(300, {})
    limit_power(300, {"CUDA_VISIBLE_DEVICES": "GPU-7, GPU-8"})
    limit_power(300, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"})
    limit_power(300, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [card for card, _ in nvml.set] == ["GPU-7", 1, 0]


@pytest.mark.parametrize(
    ("change", "watts", "says"),
    [
        ({"allowed": False}, 300, r"Insufficient Permissions .*sudo nvidia-smi -pl 300"),
        ({"driver": False}, 300, "no NVIDIA driver answers"),
        ({}, 100, "power_watts is 100, this card takes from 150 to 450"),
        ({}, 500, "power_watts is 500"),
    ],
)
def test_what_cannot_be_set_is_said_in_one_line(nvml, change, watts, says):
    vars(nvml).update(change)
    with pytest.raises(ValueError, match=says) as caught:
        limit_power(watts, {})
    assert "\n" not in str(caught.value) and nvml.set == []


def test_the_library_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ValueError, match=r"pip install 'ninfer-jax\[nvml\]'"):
        limit_power(300, {})
