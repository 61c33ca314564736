"""One turn with a tool call by a real command-line agent, against a server on a script, with loopback alone to talk to.

    npm install --prefix DIRECTORY @openai/codex @anthropic-ai/claude-code
    python tests/server/clients.py DIRECTORY          # `make check-clients`

What is tested is the protocol: the agent asks, is told to call its shell tool, runs the command, hands the result back, and ends.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from server.conftest import on_a_port  # noqa: E402
from server.scripted import Scripted  # noqa: E402

from ninfer_jax.cli.launch import settings_for  # noqa: E402
from ninfer_jax.server import Service, Settings  # noqa: E402

COMMAND, TEXT, DONE = "echo made > made.txt", "I run it.", "All done: the file is written."
# Of each client's shell tool: the name, and the parameters of the one call.
SHELLS = {
    "exec_command": {"cmd": COMMAND},
    "shell_command": {"command": COMMAND},
    "shell": {"command": ["bash", "-c", COMMAND]},
    "Bash": {"command": COMMAND, "description": "write a file"},
}
CLIENTS = {
    "codex": ["codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "Write made.txt"],
    "claude-code": ["claude", "-p", "Write made.txt", "--allowedTools", "Bash"],
}


def script(prompt: str) -> str:
    """A call of the shell tool, once; then the end."""
    thought = "" if prompt.endswith("</think>\n\n") else "Let me see.\n</think>\n\n"
    tools = set(re.findall(r'"name": ?"(\w+)"', prompt))
    shell = next((name for name in SHELLS if name in tools), None)
    if "<tool_response>" in prompt or shell is None:
        return f"{thought}{DONE}<|im_end|>"
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in SHELLS[shell].items()}
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"{thought}{TEXT}\n\n<tool_call>\n<function={shell}>\n{parameters}</function>\n</tool_call><|im_end|>"


def turn(client: str, binaries: Path) -> None:
    """One turn in a fresh home; AssertionError with what the client said if it did not come to its end."""
    engine = Scripted(script, round=6, context=262_144)
    service = Service(Settings("tiny", api_keys=("key",)), engine)
    with on_a_port(service) as address, tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        home = Path(folder)
        (home / "work").mkdir()
        found = settings_for(client, address, "tiny", 262_144)
        for name, text in found.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text)
        environment = {"PATH": os.environ["PATH"], "HOME": folder, "NINFER_API_KEY": "key"}
        environment |= {name: value.replace("$NINFER_API_KEY", "key") for name, value in found.environment.items()}
        command = [str(binaries / CLIENTS[client][0]), *CLIENTS[client][1:]]
        done = subprocess.run(
            command, cwd=home / "work", env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0 and DONE in said, said
        assert (home / "work/made.txt").read_text() == "made\n", said
    sessions = {one["session"] for one in engine.submitted if "<tools>" in one["prompt"]}
    assert len(sessions) == 1 and None not in sessions, f"requests of one conversation have the sessions {sessions}"
    print(
        f"{client}: {len(engine.submitted)} requests, prompts of {[len(one['ids']) for one in engine.submitted]} tokens, no refusal"
    )


if __name__ == "__main__":
    for name in sys.argv[2:] or CLIENTS:
        turn(name, Path(sys.argv[1]).resolve() / "node_modules/.bin")
