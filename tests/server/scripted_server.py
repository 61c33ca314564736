"""A server process on a script, for tests of the process: `python scripted_server.py '{"load_s": 1, "round_s": 0.05, ...}'`."""

from __future__ import annotations

import json
import socket
import sys
import time

from server.scripted import Scripted

from ninfer_jax.server import Service, Settings
from ninfer_jax.server.process import listen, run, url_of


def main() -> None:
    options = json.loads(sys.argv[1])
    load_s, fails = options.pop("load_s", 0), options.pop("fails", "")
    service = Service(Settings("tiny", **options.pop("settings", {})))

    def load(progress):
        for done in range(4):
            progress("weights", done, 4)
            time.sleep(load_s / 4)
        if fails:
            raise ValueError(fails)
        said = options.pop("said", "Hm.\n</think>\n\nHello there!<|im_end|>")
        return Scripted(lambda prompt: said, **options)

    def say(line: str) -> None:
        print(line, flush=True)

    send_buffer = options.pop("send_buffer", 0)
    with listen("127.0.0.1", 0) as listening:
        if send_buffer:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        say(url_of(listening))
        ended = run(service, listening, load, say)
    backend = service.backend
    say(f"ended {ended.loading} {backend.closed if isinstance(backend, Scripted) else None}")


if __name__ == "__main__":
    main()
