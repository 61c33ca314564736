"""Rendering against transformers' own renderer, on a template of our own."""

import json
from datetime import datetime
from pathlib import Path

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ninfer_jax.text import ChatTemplate

CALL = {"function": {"name": "f", "arguments": {"city": "São <b> & 'x'", "n": 2, "o": {"a": [1, True, None]}}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": 'Weather <now> & later "é"'}}]
CONVERSATIONS = {
    "plain": ([{"role": "user", "content": " Hi\n"}], {}),
    "no_thinking": ([{"role": "user", "content": "Hi"}], {"enable_thinking": False}),
    "no_generation_prompt": ([{"role": "user", "content": "Hi"}], {"add_generation_prompt": False}),
    "system": ([{"role": "system", "content": " S "}, {"role": "user", "content": "<b> & 'x'"}], {}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
    "tools": ([{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}], {"tools": TOOLS}),
    "inline_thinking": (
        [
            {"role": "user", "content": "q1"},
            {"role": "assistant", "content": "<think>\nr1\n</think>\n\na1"},
            {"role": "user", "content": "q2"},
            {"role": "assistant", "content": "<think>\nr2\n</think>\n\na2"},
        ],
        {},
    ),
    "kept_thinking": (
        [
            {"role": "user", "content": "q1"},
            {"role": "assistant", "content": "a1", "reasoning": "r1"},
            {"role": "user", "content": "q2"},
        ],
        {"keep_thinking": True},
    ),
    "tool_round": (
        [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "20"},
            {"role": "tool", "content": "21"},
        ],
        {"tools": TOOLS},
    ),
    "wrapped_tool_response": (
        [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
            {"role": "user", "content": "<tool_response>\n20\n</tool_response>"},
        ],
        {},
    ),
    "date": ([{"role": "user", "content": "Q"}], {"show_date": True}),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_equals_transformers(template: ChatTemplate, template_source: str, name: str):
    messages, options = CONVERSATIONS[name]
    options = {"add_generation_prompt": True} | options
    (expected,) = render_jinja_template([messages], chat_template=template_source, **options)[0]
    # transformers gives reasoning one name before it renders; ours does it when it checks messages
    named = [m | ({"reasoning_content": m["reasoning"]} if "reasoning" in m else {}) for m in messages]
    assert template.render(named, **options) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n    {% if loop.first %}\n  x\n    {% endif %}\n{{ m.content }}\n{% endfor %}\n",
        "{% set x = 'out' %}{% generation %}{% set x = 'in' %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{% generation %}{{ loop.index }}{{ m }}{% endgeneration %}{% break %}{% endfor %}",
        "{{ messages | tojson(indent=2, sort_keys=true) }}{{ documents is none }}{{ tools is none }}",
        "{{ ('<a>' ~ messages[0].content) | tojson | safe }}{{ undefined_name }}{{ messages[0].missing }}",
        "{% set ns = namespace(self=1) %}{% set ns.x = 2 %}{{ ns.self + ns.x }}{{ dict(a=1) }}{{ range(3) | list }}",
    ],
)
def test_details_equal_transformers(source: str):
    messages = [{"role": "user", "content": 'é <b> & "q"'}, {"role": "assistant", "content": "two"}]
    (expected,) = render_jinja_template([messages], chat_template=source, add_generation_prompt=True)[0]
    assert ChatTemplate(source).render(messages) == expected


def test_options_are_what_the_template_reads(template: ChatTemplate):
    assert template.options == {"enable_thinking", "keep_thinking", "show_date"}
    # read before it is set, even within one assignment: still an option; set first: not
    source = "{% set effort = effort | default('high') %}{% if messages %}{% set own = 1 %}{% endif %}{{ own }}"
    assert ChatTemplate(source).options == {"effort"}


def test_the_clock_can_be_set():
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}").render([], now=datetime(2024, 7, 26)) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "chat template: Nothing to say."),
        ([{"role": "system", "content": "S"}], "chat template: No user query."),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "S"}], "chat template: System message must"),
        (
            [{"role": "user"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
            "chat template: Can only get item pairs from a mapping",
        ),
        ([{"role": "user", "content": 3}], "chat template: .*not iterable"),
    ],
)
def test_exceptions_keep_their_text(template: ChatTemplate, messages: list[dict], error: str):
    with pytest.raises(ValueError, match=f"^{error}") as caught:
        template.render(messages)
    assert not isinstance(caught.value, jinja2.TemplateError) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ namespace(_x=1) }}",
    ],
)
def test_templates_stay_in_the_sandbox(source: str):
    with pytest.raises(ValueError, match="chat template: .*(unsafe|underscore)"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_syntax_errors_are_named():
    with pytest.raises(ValueError, match="chat template: .*endif"):
        ChatTemplate("{% if x %}")


def test_from_dir(tmp_path: Path):
    config = tmp_path / "tokenizer_config.json"
    render = ChatTemplate.render
    with pytest.raises(ValueError, match="no chat_template.jinja and no chat_template in tokenizer_config.json"):
        ChatTemplate.from_dir(tmp_path)
    config.write_text("{")
    with pytest.raises(ValueError, match="tokenizer_config.json is not JSON"):
        ChatTemplate.from_dir(tmp_path)
    content = {"chat_template": "A{{ eos_token }}{{ bos_token }}", "eos_token": {"content": "<e>"}, "bos_token": None}
    config.write_text(json.dumps(content))
    assert render(ChatTemplate.from_dir(tmp_path), []) == "A<e>"
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert render(ChatTemplate.from_dir(tmp_path), []) == "D"
    (tmp_path / "chat_template.jinja").write_text("é{{ messages|length }}\n", encoding="utf-8")
    assert render(ChatTemplate.from_dir(tmp_path), [{}]) == "é1"
    for name in ("chat_template.jinja", "tokenizer_config.json"):  # with byte order marks, of which none gets into the prompt
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    assert render(ChatTemplate.from_dir(tmp_path), [{}]) == "é1"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="chat_template.jinja: not UTF-8"):
        ChatTemplate.from_dir(tmp_path)
