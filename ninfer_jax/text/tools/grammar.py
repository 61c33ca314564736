"""The Lark grammar of tool calls in this model's format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from ninfer_jax.text.tools.choice import ToolPlan
from ninfer_jax.text.tools.values import Unfit, dumped, resolve

# JSON on one line, as `json.dumps` writes it and the template renders arguments: no answer is an endless blank, and all but the
# values is forced. A schema's own "x-guidance" goes before it.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


# Text without a call, and text up to one, whose tag ends it.
_PROSE = ("PLAIN: /(?s:.*)/ & ~/(?s:.*)<tool_call>(?s:.*)/", 'lead[suffix="<tool_call>"]: /(?s:.*)/')


class GrammarError(ValueError):
    """A grammar that is refused; one line that names the field and the reason."""


def call_grammar(plan: ToolPlan) -> str:
    """The Lark grammar of a plan's calls; strings are free text up to their closing tag, other values JSON of their schema."""
    names = [json.dumps(f"<function={name}>\n", ensure_ascii=False) for name in plan.callable]
    more = "" if plan.max_calls == 1 else ' ("\\n" call)*'
    lines = [f"start: call{more}"] if plan.required else [f"start: PLAIN | lead inside{more}", *_PROSE]
    lines += ["call: TAG inside", 'inside: "\\n" (' + " | ".join(f"{name} body{i}" for i, name in enumerate(names)) + ") END"]
    lines += ["TAG: /<tool_call>/", "END: /<\\/function>\\n<\\/tool_call>/"]
    return "\n".join([*lines, *(line for i, schema in enumerate(plan.callable.values()) for line in _body(i, schema))])


def _body(index: int, schema: object) -> list[str]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    required = schema.get("required") if isinstance(schema, Mapping) else None
    parts, lines = [], []
    for at, (name, value) in enumerate((properties or {}).items()):
        if re.search(r"[<>\n]", name):
            raise GrammarError(f"tools: the parameter {name!r} cannot be written in this model's format")
        rule = f"value{index}_{at}"
        parts.append(f"{rule}{'' if isinstance(required, list) and name in required else '?'}")
        head = json.dumps(f"<parameter={name}>\n", ensure_ascii=False)
        if _is_string(value, schema):
            lines.append(f"{rule}: {head} text{index}_{at}")
            lines.append(f'text{index}_{at}[suffix="\\n</parameter>\\n"]: /(?s:.*)/')
        else:
            defs = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, Mapping) and key in schema}
            inner = value if value is False else {"x-guidance": JSON_STYLE, **defs, **(value if isinstance(value, Mapping) else {})}
            lines.append(f'{rule}: {head} json{index}_{at} "\\n</parameter>\\n"')
            lines.append(f"json{index}_{at}: %json {dumped(inner)}")
    inside = " ".join(parts) or '""'
    return [f"body{index}: {inside}", *lines]


def _is_string(schema: object, root: object) -> bool:
    """Whether a parameter takes text and nothing else, so that it is written without quotes."""
    for _ in range(20):
        if isinstance(schema, Mapping) and "$ref" in schema:
            try:
                schema = resolve(schema["$ref"], root)
            except Unfit as error:
                raise GrammarError(f"tools: {error}") from None
    return isinstance(schema, Mapping) and schema.get("type") == "string" and not {"enum", "const", "pattern"} & schema.keys()
