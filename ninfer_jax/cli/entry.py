"""The process of a command: an interrupt (SIGINT, Ctrl-C) ends it with status 130 and without a traceback, wherever it strikes.

Python makes an exception of the signal, between two lines. That alone is not enough: importing JAX takes a second, while
XLA compiles no next line comes for many, and in a finalizer, or on its way through C++, the exception is dropped or becomes
another one. So this is in place before anything large is imported, and a thread sees to it that the end comes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

INTERRUPTED = 130
GRACE = 1.5  # seconds that a command has to clean up; then, or at a second interrupt, the process ends where it stands


def main() -> None:
    """Run the command line and exit."""
    interrupts = None
    try:
        interrupts = Interrupts()
        try:
            from ninfer_jax.cli.main import app

            app(prog_name="ninfer-jax")
        finally:
            interrupts.over()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or (interrupts is not None and interrupts.seen):
            _leave()
        raise


class Interrupts:
    """From now on an interrupt raises KeyboardInterrupt, once, and ends the process `GRACE` seconds later at the latest."""

    def __init__(self) -> None:
        self.seen = False
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return  # as under nohup: whoever started the process does not want it to be interrupted
        told, tell = os.pipe()
        os.set_blocking(tell, False)
        threading.Thread(target=self._wait, args=(told,), daemon=True).start()
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)  # written to at once, whatever the main thread is doing
        signal.signal(signal.SIGINT, self._raise)
        self._report, sys.unraisablehook = sys.unraisablehook, self._dropped

    def over(self) -> None:
        """The command has ended: what comes later must not disturb the interpreter's own end."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        again, self.seen = self.seen, True
        if again:
            return
        while frame is not None:
            # Nothing is to be cleaned up yet; and an exception in the middle of a C++ module's own beginnings ends in a
            # segmentation fault (5 of 80 interrupts spread over the imports of numpy and jaxlib, measured).
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                _leave()
            frame = frame.f_back
        raise KeyboardInterrupt

    def _wait(self, told: int) -> None:
        os.read(told, 1)
        again = threading.Thread(target=lambda: (os.read(told, 1), _leave()), daemon=True)
        again.start()
        again.join(GRACE)
        _leave()

    def _dropped(self, unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _leave()
        self._report(unraisable)


def _leave() -> None:
    try:
        if os.isatty(2):
            os.write(2, b"\x1b[?25h\n")  # a progress bar hides the cursor
    finally:
        os._exit(INTERRUPTED)
