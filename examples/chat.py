"""A conversation: the whole history goes through the chat template each turn, the reply streams in.

    python examples/chat.py

/new forgets the conversation, /quit (or the end of input) leaves, Ctrl-C stops a reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ninfer_jax import Delta, Engine, EngineConfig
from ninfer_jax.checkpoints import tiny_path

console = Console(highlight=False, emoji=False)


def main(
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory; default: the bundled model.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    draft: Annotated[int, typer.Option(help="Tokens the MTP head drafts a round, 0 to 5.")] = 2,
    context: Annotated[int, typer.Option(help="Tokens that the conversation may have.")] = 4096,
    max_new: Annotated[int, typer.Option(help="Tokens of one reply at most.")] = 512,
    thinking: Annotated[bool, typer.Option(help="Let the model reason first.")] = True,
) -> None:
    """Chat with a model."""
    console.print("loading; a first start compiles its programs: seconds on a CPU, minutes for the 27B", style="dim")
    engine = Engine.load(model or tiny_path(), EngineConfig(context=context, draft=draft))
    params = engine.default_params(max_new_tokens=max_new)
    opening = [{"role": "system", "content": system}] if system else []
    history = list(opening)
    while (text := ask()) is not None and text != "/quit":
        if text == "/new":
            history = list(opening)
        elif text:
            turn = {"role": "user", "content": text}
            try:
                reply = show(engine.stream([*history, turn], params, enable_thinking=thinking))
            except ValueError as error:  # for instance a conversation that has outgrown the context
                console.print(f"{error}\n(/new starts afresh)", style="red", markup=False)
            else:
                history += [turn, reply]


def ask() -> str | None:
    """The user's next line; None at the end of input."""
    try:
        return console.input("[bold]> [/bold]").strip()
    except EOFError:
        return None


def show(pieces: Iterator[Delta]) -> dict[str, str]:
    """Print a reply as it comes and return it as a message. Its reasoning is kept: the template decides what to do with it."""
    answer = reasoning = ""
    try:
        for piece in pieces:
            console.print(piece.reasoning, end="", style="dim italic", markup=False, soft_wrap=True)
            reasoning += piece.reasoning
            if piece.text and not answer and reasoning:
                console.print()
            console.print(piece.text, end="", markup=False, soft_wrap=True)
            answer += piece.text
    except KeyboardInterrupt:
        pieces.close()  # frees the slot; what has come so far stays in the history
    console.print()
    return {"role": "assistant", "content": answer, "reasoning_content": reasoning}


if __name__ == "__main__":
    typer.run(main)
