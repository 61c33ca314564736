"""Conversations for training the bundled model, made from the training split by rule and from a few fixed answers.

`chat_documents(corpus, seed)` cuts scenes and modules into a question ("Continue this scene: ...") and an answer (what
really follows), adds short talk, and calls of made-up tools, and renders all of it with `weights/tiny/chat_template.jinja`.
About half of the answers think first, in one sentence; the others have the empty thinking part that
`enable_thinking=false` asks for. Another seed gives other cuts, so every epoch can have its own.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from typing import Any

import jinja2
from tiny_corpus import Corpus, Document, build_corpus
from tiny_talk import CALLS, SYSTEM_LINES, TALK, TOOLS, WORDS
from tiny_tokenizer import TINY_DIR

Message = dict[str, Any]
SPEAKER = re.compile(r"[A-Z][A-Za-z' -]{1,30}\.")
MAX_ANSWER = 700  # characters of an answer; it ends with a speech or a block of code


def chat_template() -> jinja2.Template:
    """The bundled template, compiled as transformers compiles it."""

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string((TINY_DIR / "chat_template.jinja").read_text("utf-8"))


def speeches(scene: Document) -> list[tuple[str, str]]:
    """`(speaker, paragraph)` of a scene in order; stage directions have the speaker ""."""
    found = []
    for paragraph in scene.text.strip().split("\n\n")[1:]:
        first = paragraph.split("\n", 1)[0]
        found.append((first[:-1] if SPEAKER.fullmatch(first) else "", paragraph))
    return found


def whole_pieces(pieces: list[str], limit: int, glue: str = "\n\n") -> str:
    """As many leading pieces as fit into `limit` characters, at least one."""
    text = pieces[0]
    for piece in pieces[1:]:
        if len(text) + len(glue) + len(piece) > limit:
            break
        text += glue + piece
    return text


class Writer:
    """Draws conversations; every method named `ask_*` yields the messages of one."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scenes = [s for s in (speeches(d) for d in corpus.train if d.kind == "play") if len(s) >= 6]
        self.spoken = [(who, text) for scene in self.scenes for who, text in scene if who and 60 <= len(text) <= MAX_ANSWER]
        self.by_word = {word: [s for s in self.spoken if re.search(rf"\b{word}\b", s[1])] for word in WORDS}
        self.by_name: dict[str, list[tuple[str, str]]] = {}
        for who, text in self.spoken:
            self.by_name.setdefault(who, []).append((who, text))
        self.names = sorted(name for name, said in self.by_name.items() if len(said) >= 15)
        self.modules = [d for d in corpus.train if d.kind == "code"]
        self.functions = [found for d in self.modules for found in functions(d.text)]

    def answer(self, text: str, thought: str, **more: Any) -> Message:
        thought = thought if self.rng.random() < 0.5 else ""
        return {"role": "assistant", "content": text, "reasoning_content": thought, **more}

    def user(self, text: str) -> Message:
        """A question as people type it: now and then without capital or end mark."""
        if "\n" not in text:
            if self.rng.random() < 0.2:
                text = text[0].lower() + text[1:]
            if self.rng.random() < 0.2:
                text = text.rstrip(".?!")
        return {"role": "user", "content": text}

    def ask_scene(self) -> list[Message]:
        rng, scene = self.rng, self.rng.choice(self.scenes)
        at = rng.randrange(len(scene) - 3)
        texts = [text for _, text in scene]
        given = whole_pieces(texts[at : at + rng.randint(1, 3)], 400)
        at += given.count("\n\n") + 1
        request = rng.choice(["Continue this scene:", "Go on with this scene:", "What comes next?", "Carry on:", "Continue:"])
        messages = [self.user(f"{request}\n\n{given}" if rng.random() < 0.8 else f"{given}\n\n{request[:-1]}.")]
        for turn in range(2 if rng.random() < 0.2 else 1):
            if at >= len(scene):
                break
            if turn:
                messages.append(self.user(rng.choice(["Go on.", "And then?", "More, please.", "What happens next?"])))
            follows = whole_pieces(texts[at:], MAX_ANSWER)
            who = scene[at][0]
            thought = f"They want the scene to go on; {who} speaks next." if who else "They want the scene to go on."
            messages.append(self.answer(follows, thought))
            at += follows.count("\n\n") + 1
        return messages

    def ask_lines(self) -> list[Message]:
        who, text = self.rng.choice(self.spoken)
        lines = text.split("\n")[1:]
        if len(lines) < 3:
            return self.ask_scene()
        cut = self.rng.randint(1, min(3, len(lines) - 1))
        request = self.rng.choice(["Finish this speech:", "Continue these lines:", "Complete the verse:"])
        thought = f"These lines are spoken by {who}; the speech goes on."
        return [self.user(f"{request}\n\n" + "\n".join(lines[:cut])), self.answer("\n".join(lines[cut:]), thought)]

    def ask_word(self) -> list[Message]:
        word = self.rng.choice(WORDS)
        who, text = self.rng.choice(self.by_word[word])
        request = self.rng.choice(
            [
                "Speak of {}.",
                "Tell me about {}.",
                "Say something about {}.",
                "A few lines on {}, please.",
                "What do you think of {}?",
                "Write a verse about {}.",
                "Give me a speech about {}.",
            ]
        ).format(word)
        return [self.user(request), self.answer(text, f"They ask about {word}; {who} has words on it.")]

    def ask_name(self) -> list[Message]:
        name = self.rng.choice(self.names)
        who, text = self.rng.choice(self.by_name[name])
        shown = who.title().replace("'S", "'s")
        request = self.rng.choice(
            ["What does {} say?", "Speak as {}.", "Give me a speech of {}.", "Write some lines for {}.", "Let {} speak."]
        ).format(shown)
        return [self.user(request), self.answer(text, f"They want to hear {shown}.")]

    def ask_code(self) -> list[Message]:
        name, source = self.rng.choice(self.functions)
        lines = source.split("\n")
        cut = self.rng.randint(1, max(1, len(lines) // 2))
        request = self.rng.choice(["Complete this Python code:", "Finish this function:", "Continue this Python code:"])
        thought = f"They want the rest of the function {name}."
        return [self.user(f"{request}\n\n" + "\n".join(lines[:cut])), self.answer("\n".join(lines[cut:]), thought)]

    def ask_function(self) -> list[Message]:
        name, source = self.rng.choice(self.functions)
        request = self.rng.choice(
            [
                "Write a Python function called {}.",
                "Write the function {} in Python.",
                "Show me a function named {}.",
                "Python: define {}.",
            ]
        ).format(name)
        return [self.user(request), self.answer(source, f"They want a Python function called {name}.")]

    def ask_talk(self) -> list[Message]:
        messages = []
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            questions, answers, thought = self.rng.choice(TALK)
            messages += [self.user(self.rng.choice(questions)), self.answer(self.rng.choice(answers), thought)]
        return messages

    def ask_tool(self) -> list[Message]:
        questions, values, tool, key, results, replies = self.rng.choice(CALLS)
        value = self.rng.choice(values)
        number = str(self.rng.randint(2, 90))
        call = {"function": {"name": tool, "arguments": {key: value}}}

        def fill(text: str) -> str:
            return text.replace("@", value).replace("#", number)

        messages = [self.user(fill(self.rng.choice(questions))), self.answer("", f"I should call {tool}.", tool_calls=[call])]
        if self.rng.random() < 0.6:
            messages += [
                {"role": "tool", "content": fill(results)},
                self.answer(fill(self.rng.choice(replies)), "The result is here; I tell it."),
            ]
        return messages

    def conversations(self) -> Iterator[tuple[str, list[Message], list[dict[str, Any]] | None]]:
        kinds = {"scene": 34, "lines": 8, "word": 13, "name": 7, "code": 10, "function": 6, "talk": 17, "tool": 5}
        while True:
            kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
            messages = getattr(self, f"ask_{kind}")()
            if self.rng.random() < 0.15:
                messages = [{"role": "system", "content": self.rng.choice(SYSTEM_LINES)}, *messages]
            tools = None
            if kind == "tool":
                called = next(m["tool_calls"] for m in messages if "tool_calls" in m)[0]["function"]["name"]
                others = self.rng.sample([t for t in TOOLS if t["function"]["name"] != called], self.rng.randint(0, 1))
                tools = [t for t in TOOLS if t["function"]["name"] == called] + others
                self.rng.shuffle(tools)
            yield kind, messages, tools


def functions(source: str) -> list[tuple[str, str]]:
    """`(name, text)` of the plain functions and methods of a module that have at most `MAX_ANSWER` characters."""
    found = []
    for match in re.finditer(r"(?m)^( *)def (\w+)\(.*\n(?:(?:\1 .*)?\n)+", source):
        lines = match[0].rstrip().split("\n")
        text = "\n".join(line[len(match[1]) :] for line in lines)
        if len(lines) >= 4 and len(text) <= MAX_ANSWER and not match[2].startswith("__"):
            found.append((match[2], text))
    return found


def chat_documents(corpus: Corpus, seed: int, share: float = 0.15) -> list[Document]:
    """Conversations of together about `share` of the training split's characters, the same ones for the same seed."""
    template = chat_template()
    budget = share * sum(len(document.text) for document in corpus.train)
    documents: list[Document] = []
    size = 0
    stream = Writer(corpus, seed).conversations()
    while size < budget:
        kind, messages, tools = next(stream)
        text = template.render(messages=messages, tools=tools, add_generation_prompt=False).rstrip("\n")
        documents.append(Document(text, "chat", f"{kind}/{len(documents):05d}"))
        size += len(text)
    return documents


def main() -> None:
    documents = chat_documents(build_corpus(), seed=0)
    for kind in sorted({d.name.split("/")[0] for d in documents}):
        sizes = [len(d.text) for d in documents if d.name.startswith(kind + "/")]
        print(f"{kind:9s}{len(sizes):5d} conversations {sum(sizes):8d} characters", file=sys.stderr)
    for document in random.Random(1).sample(documents, 12):
        print(f"--- {document.name}\n{document.text}")


if __name__ == "__main__":
    main()
