"""Every kernel of the 27B compiles for every card: the GPU compiler refuses what the interpreter lets pass, card by card."""

import pytest

from pallas_kernels import deviceless, targets
from pallas_kernels.lab import registry

pytestmark = pytest.mark.full

OTHERS = [name for name in targets.names() if name != "rtx4090"]  # that one is looked at in each kernel's own test


@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize("case", registry.cases(), ids=lambda case: f"{case.op}/{case.name}")
def test_compiles(case: registry.Case, target: str) -> None:
    compiled = deviceless.compile_for(case.call, case.arguments(), target, donate=getattr(case, "donate", ()))
    text = compiled.as_text()
    assert "__gpu$xla.gpu.triton" in text or "triton_kernel" in text, "no Pallas kernel is in the program"
