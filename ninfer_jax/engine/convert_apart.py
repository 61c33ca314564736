"""A conversion in a process of its own, on the CPU: its memory is gone when it ends, and it never starts the card that the
engine is about to take.

The job goes in as JSON on one line; lines of JSON come back: [stage, done, total] while it runs, and at the end nothing, or
{"refused": ...}. When whoever wants the artifact has died, its end of stdin closes, and the conversion ends too: what is done of
it stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ninfer_jax.engine.convert_apart import main; main()"


def convert_apart(
    source: Path, destination: Path, options: Mapping[str, Any], tell: Callable[[str, int, int], None], lock: int
) -> None:
    """Convert `source` into `destination`, as `ninfer_jax.engine.convert` does with `options`, and wait for it. lock: of the
    destination, which is free when both processes are gone. ValueError for what is refused; RuntimeError for a process that
    ended otherwise."""
    command = [sys.executable, "-c", START, json.dumps(sys.path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    job = json.dumps({"source": str(source), "destination": str(destination), **options}) + "\n"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, pass_fds=(lock,), **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        errors: list[str] = []
        threading.Thread(target=lambda lines: errors.extend(lines), args=(process.stderr,), daemon=True).start()
        refused = None
        try:
            process.stdin.write(job)
            process.stdin.flush()
            for line in process.stdout:
                said = json.loads(line)
                if isinstance(said, dict):
                    refused = said["refused"]
                else:
                    tell(*said)
        except BrokenPipeError:
            # It ended before it began; how, its status says. What is left in the pipe's buffer would raise once more.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        except BaseException:
            process.kill()
            raise
        status = process.wait()
    if refused is not None:
        raise ValueError(refused)
    if status == -signal.SIGKILL:
        raise ValueError(f"{source}: the conversion was killed, as the system does when memory runs out; started again, it goes on")
    if status:
        last = next((line.strip() for line in reversed(errors) if line.strip()), "no word about why")
        raise RuntimeError(f"the conversion of {source} ended with status {status}: {last}")


def main() -> None:
    """The other process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for whoever waits, who ends this one
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    out, lock = sys.stdout, threading.Lock()
    sys.stdout = sys.stderr
    last: dict[str, int] = {}

    def say(content: Any) -> None:
        with lock:
            out.write(json.dumps(content) + "\n")
            out.flush()

    def progress(stage: str, done: int, total: int) -> None:
        step = total // 500  # a line for each fifth of a percent
        if done == total or done - last.get(stage, -step - 1) > step:
            last[stage] = done
            say([stage, done, total])

    from ninfer_jax.engine.convert import convert

    try:
        convert(job.pop("source"), job.pop("destination"), job.pop("recipe"), **job, progress=progress)
    except (ValueError, OSError) as error:
        say({"refused": str(error)})


def _end_with_the_other() -> None:
    sys.stdin.read()
    os._exit(1)
