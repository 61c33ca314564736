"""The page in a headless Chromium, against servers on a script: `make check-page`.

    npm install --prefix DIRECTORY @sparticuz/chromium puppeteer-core
    python tests/server/check_page.py DIRECTORY/node_modules [PICTURES [PART_OF_A_NAME]]

`page.mjs` drives the browser and says what has to be so. Its pictures go to PICTURES. With PART_OF_A_NAME
only the checks called so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from server.conftest import on_a_port  # noqa: E402
from server.scripted import Scripted  # noqa: E402

from ninfer_jax.server import Service, Settings  # noqa: E402

MEMORY = {"total": 24 << 30, "parts": {"weights": 14 << 30, "pages": 4 << 30, "states": 1 << 29, "workspace": 200 << 20}}
ANSWERS = {
    "Think": "Two and two, let me see. That is not hard.\n</think>\n\n"
    "It is **four**:\n\n```python\nprint(2 + 2)\n```\n\nRun it with `python`.",
    "Weather": "I must look.\n</think>\n\nI look.\n\n"
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    "Long": "Hm.\n</think>\n\n" + "Tomorrow, and tomorrow, and tomorrow, creeps in this petty pace from day to day. " * 40,
    "Markup": "Hm.\n</think>\n\n<img src=x onerror=\"document.title='run'\"> <b>not bold</b> & so on",
}


def script(prompt: str) -> str:
    """What the last message of the user or of a tool asks for."""
    asked = prompt.rpartition("<|im_start|>user\n")[2]
    if "<tool_response>" in asked:
        said = asked.partition("<tool_response>")[2].partition("</tool_response>")[0].strip()
        return f"So.\n</think>\n\nThe tool said: {said}.<|im_end|>"
    return next((text for word, text in ANSWERS.items() if asked.startswith(word)), "Hm.\n</think>\n\nYes.") + "<|im_end|>"


def main() -> int:
    modules, pictures, only = Path(sys.argv[1]).resolve(), sys.argv[2:3], "".join(sys.argv[3:])
    service = Service(Settings("tiny"), Scripted(script, round=3, round_s=0.03, cached=11), memory=MEMORY)
    locked = Service(Settings("tiny", api_keys=("secret",)), Scripted(script))
    with on_a_port(service) as address, on_a_port(locked) as behind_a_key, tempfile.TemporaryDirectory() as folder:
        place = Path(*pictures) if pictures else Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        given = {"modules": str(modules), "address": address, "locked": behind_a_key, "pictures": str(place), "only": only}
        return subprocess.run(["node", str(HERE / "page.mjs"), json.dumps(given)], timeout=900).returncode


if __name__ == "__main__":
    sys.exit(main())
