"""Renders a checkpoint's own chat template exactly as `transformers` does."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import ClassVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ninfer_jax.files import kind_of, read_object, read_text

# A template is foreign code: besides jinja's own errors it raises what Python's operators and filters raise, for
# instance a TypeError for `arguments|items` on a string.
_TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now", *_SPECIAL_TOKENS})


class ChatTemplate:
    """A compiled chat template.

    options: names of the switches this template reads (`enable_thinking`, `reasoning_effort` …), besides the messages
        and tools. Passing any other has no effect.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        """source: jinja2 text; special_tokens: values for `bos_token` and the like. ValueError if it does not parse."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {_one_line(error)}") from None
        self._special_tokens = dict(special_tokens or {})
        # A variable the template also sets under some condition counts as undeclared too; it is an option only if the
        # template reads it before it first sets it.
        uses: dict[str, str] = {}
        _first_uses(tree, uses)
        undeclared = jinja2.meta.find_undeclared_variables(tree) - environment.globals.keys() - _GIVEN
        self.options = frozenset(name for name in undeclared if uses[name] == "load")

    @classmethod
    def from_dir(cls, path: str | Path) -> "ChatTemplate":
        """The template of a checkpoint directory: `chat_template.jinja`, else `chat_template` in
        `tokenizer_config.json` (of several named ones, `default`). ValueError if there is none or it is damaged."""
        folder = Path(path)
        config = read_object(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        if kind_of(file) is not None:
            source = read_text(file)
        else:
            source = config.get("chat_template")
            if isinstance(source, list):
                named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
                source = named.get("default")
        if not isinstance(source, str):
            raise ValueError(f"{folder}: no chat_template.jinja and no chat_template in tokenizer_config.json")
        special = {}
        for name in _SPECIAL_TOKENS:
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                special[name] = token
        return cls(source, special)

    def render(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        **options: object,
    ) -> str:
        """The prompt text for `messages` as they are given, without any check or repair of them.

        now: what `strftime_now` reads; default the local time. ValueError carries the text of a template's exception.
        """
        now = now or datetime.now()
        try:
            return self._template.render(
                **self._special_tokens
                | {"messages": messages, "tools": tools, "documents": None, "strftime_now": now.strftime}
                | {"add_generation_prompt": add_generation_prompt}
                | options
            )
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"chat template: {_one_line(error)}") from None


def _first_uses(node: jinja2.nodes.Node, uses: dict[str, str]) -> None:
    """Records for every name whether the template first loads or stores it, in order of evaluation."""
    if isinstance(node, jinja2.nodes.Name):
        uses.setdefault(node.name, node.ctx)
    assignment = isinstance(node, jinja2.nodes.Assign)
    for child in (node.node, node.target) if assignment else node.iter_child_nodes():
        _first_uses(child, uses)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; for a prompt it is only a scope."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _PlainNamespace(jinja2.utils.Namespace):
    """`namespace()` without underscore names: through them a template could replace the object's own methods."""

    # `self` is positional only, so that a template may name an attribute `self`.
    def __init__(self, /, *mappings: object, **attributes: object) -> None:
        for name in dict(*mappings, **attributes):
            _refuse_underscore(name)
        super().__init__(*mappings, **attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} begins with an underscore")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _PlainNamespace
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
