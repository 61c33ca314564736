"""The reasoning/answer split, for every way of cutting the text."""

import itertools
import random

import pytest

from ninfer_jax.text import ReasoningSplitter, Tokenizer, starts_in_reasoning


def run(start: bool, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(start)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.flush()]
    return "".join(part.reasoning for part in parts), "".join(part.answer for part in parts)


CASES = [
    # (prompt left <think> open, text, reasoning, answer)
    (True, "why\n</think>\n\nso", "why", "so"),
    (True, "\n</think>\n\nso", "", "so"),
    (True, "</think>so", "", "so"),
    (True, "a\n\nb\n</think>\n\nc\n\nd\n", "a\n\nb", "c\n\nd\n"),
    (True, "<think>\nwhy\n</think>\n\nso", "why", "so"),
    (True, "cut off here", "cut off here", ""),
    (True, "cut off\n", "cut off\n", ""),
    (True, "cut </thi", "cut </thi", ""),
    (True, "\n<thi", "<thi", ""),
    (True, "\n\n", "", ""),
    (True, "a < b </ c\n</think>\n\n1 </think> <think> 2", "a < b </ c", "1 </think> <think> 2"),
    (True, "x</think>\n\n", "x", ""),
    (True, "x\n</think>\n</think></think>\n\nso </think>", "x", "so </think>"),
    (True, "x\n</think>\n</thi", "x", "</thi"),
    (False, "<think>\nwhy\n</think>\n\nso", "why", "so"),
    (False, "\n <think>why</think>so", "why", "so"),
    (False, "plain answer", "", "plain answer"),
    (False, "\n\nplain", "", "\n\nplain"),
    (False, "the <think> tag and </think>", "", "the <think> tag and </think>"),
    (False, "<thin", "", "<thin"),
    (False, "<think", "", "<think"),
    (False, "", "", ""),
    (True, "", "", ""),
]


@pytest.mark.parametrize(("start", "text", "reasoning", "answer"), CASES)
def test_every_cut(start: bool, text: str, reasoning: str, answer: str):
    assert run(start, [text]) == (reasoning, answer)
    assert run(start, list(text)) == (reasoning, answer)
    for size in (2, 3, 7):
        assert run(start, [text[i : i + size] for i in range(0, len(text), size)]) == (reasoning, answer)
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert run(start, [text[:first], text[first:second], text[second:]]) == (reasoning, answer)


def test_reads_an_answer_back_as_the_template_does():
    # The expressions with which the Qwen3.6 template takes reasoning out of an assistant message.
    rng = random.Random(6)
    for _ in range(500):
        pieces = ["\n", "a", " ", "<", "/", "</thin"]
        inner, outer = ("".join(rng.choices(pieces, k=rng.randrange(8))) for _ in range(2))
        content = f"<think>\n{inner}\n</think>\n\n{outer}"
        if content.count("</think>") > 1:
            continue
        reasoning = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
        answer = content.split("</think>")[-1].lstrip("\n")
        cut = rng.randrange(len(content) + 1)
        assert run(False, [content[:cut], content[cut:]]) == (reasoning, answer), content


def test_nothing_certain_is_held_back():
    splitter = ReasoningSplitter(True)
    assert splitter.push("abc") == ("abc", "") and splitter.in_reasoning
    assert splitter.push("\n</") == ("", "")
    assert splitter.push("b>") == ("\n</b>", "")
    assert splitter.push("</think>\n\nx") == ("", "x") and not splitter.in_reasoning
    assert splitter.push("\n</think>") == ("", "\n</think>")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n<think>\ncut<|im_end|>\n<|im_start|>assistant\n", False),
        ("no turns", False),
    ],
)
def test_whether_the_prompt_leaves_reasoning_open(tokenizer: Tokenizer, prompt: str, expected: bool):
    assert starts_in_reasoning(tokenizer.encode(prompt, allow_special=True), tokenizer) is expected


def test_typed_tags_do_not_open_reasoning(tokenizer: Tokenizer):
    assert not starts_in_reasoning(tokenizer.encode("<think>"), tokenizer)
