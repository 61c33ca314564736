"""The real 248,077-id tokenizer, rebuilt once per session, and a chat template of our own."""

from pathlib import Path

import pytest
import tokenizers

from ninfer_jax.checkpoints.qwen_tokenizer import build
from ninfer_jax.text import ChatTemplate, Tokenizer

# Not a copy of any model's template: it uses each construct that ours must treat as transformers does (whitespace
# control, namespaces, macros, tojson, loop controls, generation blocks, string tests on content, exceptions).
TEMPLATE = """\
{%- macro text(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content is none or content is undefined %}{{- '' }}
    {%- else %}
        {%- for part in content %}{{- part.text }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}{{- raise_exception('Nothing to say.') }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- set body = text(message.content)|trim %}
    {%- if message.role != 'user' %}{%- continue %}{%- endif %}
    {%- if not (body.startswith('<tool_response>') and body.endswith('</tool_response>')) %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if ns.last < 0 %}{{- raise_exception('No user query.') }}{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {%- if messages[0].role == 'system' %}{{- '\\n\\n' + text(messages[0].content)|trim }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + text(messages[0].content)|trim + '<|im_end|>\\n' }}
{%- endif %}
{%- if show_date %}{{- 'Date: ' + strftime_now('%Y') + '\\n' }}{%- endif %}
{%- for message in messages %}
    {%- set body = text(message.content)|trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must come first.') }}{%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + body + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not reasoning and '</think>' in body %}
            {%- set reasoning = body.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set body = body.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last or keep_thinking %}
            {{- '<think>\\n' + reasoning|trim + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- body }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments|items %}
                {{- '<parameter=' + name + '>\\n' }}{{- value if value is string else value | tojson | safe }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + body + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}{{- raise_exception('Unknown role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n') }}
{%- endif %}
"""


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("qwen3.8"), "3.8").parent


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(tokenizer_dir)


@pytest.fixture(scope="session")
def stock(tokenizer_dir: Path) -> tokenizers.Tokenizer:
    """The library's own reading of the same file: the oracle for ids and for decoded text."""
    return tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def template_source() -> str:
    return TEMPLATE


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE)
