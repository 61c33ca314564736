"""Real interrupts of the command line, from its first imports to its last token: status 130, no traceback, no wrong text."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Whatever the test was started by may ignore the signal, and a process inherits that.
COMMAND = "import signal; signal.signal(signal.SIGINT, signal.{}); from ninfer_jax.cli.entry import main; {}; main()"
PROMPT = ("--prompt", "To be, or not to be, that is the question. " * 4, "--greedy", "--max-new", "100")
# Those of `micro_drafting`, whose programs may be in JAX's cache.
SHAPE = ("--context", "256", "--kv", "f32", "--prefill-chunk", "64", "--draft", "1", "--slots", "2")


def command(*arguments: str, handler: str = "default_int_handler", first: str = "0") -> subprocess.Popen[str]:
    line = [sys.executable, "-c", COMMAND.format(handler, first), *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(line, **pipes, encoding="utf-8", env=os.environ | {"JAX_PLATFORMS": "cpu"})


@pytest.fixture(scope="module")
def start(micro_drafting, micro_path: Path):
    """Starts a command, `generate` of a prompt unless told otherwise; returns once it has taken charge of interrupts, which
    its second thread tells."""

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = command("generate", str(micro_path), *(arguments or PROMPT), *SHAPE)
        while len(list(Path(f"/proc/{process.pid}/task").iterdir())) < 2:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.002)
        return process

    return start


@pytest.fixture(scope="module")
def whole(start) -> tuple[str, float]:
    """What the command prints when it is left alone, and the seconds it takes."""
    process, began = start(), time.perf_counter()
    text, errors = process.communicate()
    taken = time.perf_counter() - began
    assert process.returncode == 0, errors
    assert len(text) > 100
    return text, taken


def assert_interrupted(process: subprocess.Popen[str], whole: str, before: str = "") -> bool:
    """Ends as it should; whether the interrupt came in time."""
    text, errors = process.communicate()
    if process.returncode == 0:
        assert before + text == whole
        return False
    assert process.returncode == 130, errors
    assert whole.startswith(before + text.rstrip("\n"))
    assert not any(word in errors for word in ("Traceback", "Error", "rror:", "ignored", "Interrupt")), errors
    return True


@pytest.mark.parametrize("count", [4, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.long
def test_an_interrupt_at_any_moment(start, whole, count: int):
    text, taken = whole
    for at in range(count):
        while True:
            process, began = start(), time.perf_counter()
            time.sleep(taken * at / count)
            process.send_signal(signal.SIGINT)
            if assert_interrupted(process, text):
                break
            # It had ended by then: how long a run takes depends on what else the machine does.
            taken = 0.9 * min(taken, time.perf_counter() - began)


def test_an_interrupt_while_it_writes(start, whole):
    process = start()
    before = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert_interrupted(process, whole[0], before)


def test_interrupts_one_upon_another(start, whole):
    process = start()
    for _ in range(20):
        process.send_signal(signal.SIGINT)
        time.sleep(0.001)
    assert assert_interrupted(process, whole[0])


def test_an_interrupt_instead_of_a_prompt(start):
    process = start("-")
    process.stdin.write("To be, ")
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    assert assert_interrupted(process, "")


def test_an_interrupt_that_was_ignored_from_the_start_stays_so():
    """As under nohup."""
    process = command("generate", "--help", handler="SIG_IGN", first="print('ready', flush=True)")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate()
    assert process.returncode == 0 and "Complete a prompt" in text, errors
