"""A look at the machine: what is there, what is wrong with it, what to do, and whether the engine answers as it should.

`inputs` reads, `host` and `card` judge what was read, `known_answer` runs the bundled model, `report` writes for a bug report.
"""

from ninfer_jax.doctor.card import judge_card
from ninfer_jax.doctor.finding import FINE, NOTE, WRONG, Finding
from ninfer_jax.doctor.host import judge_host
from ninfer_jax.doctor.inputs import Inputs, read
from ninfer_jax.doctor.known_answer import self_test
from ninfer_jax.doctor.report import report

__all__ = ["FINE", "NOTE", "WRONG", "Finding", "Inputs", "judge_card", "judge_host", "read", "report", "self_test"]
