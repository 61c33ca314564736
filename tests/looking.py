"""Looking up what followed before, in plain Python: what drafts from a sequence's own tokens are compared with."""

from __future__ import annotations


def searched(tokens: list[int], width: int, shortest: int, longest: int) -> list[int]:
    """What followed the latest of the longest matches, by trying every place for every length, the longest first; -1s where
    there is none. Places with fewer than `longest` tokens before them do not count."""
    for length in range(longest, shortest - 1, -1):
        for place in range(len(tokens) - 1, longest - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                text = list(tokens)
                for row in range(width):
                    text.append(text[place + row])
                return text[len(tokens) :]
    return [-1] * width


def walked(prompt: list[int], answer: list[int], width: int, shortest: int, longest: int) -> tuple[int, int, int]:
    """(rounds, drafted, accepted) of an answer whose drafts are looked up, `width` a round."""
    rounds = drafted = accepted = 0
    done = 1  # the prompt itself gives the first token
    while done < len(answer):
        drafts = searched([*prompt, *answer[:done]], width, shortest, longest)
        left = answer[done:]
        agree = next((row for row in range(width) if row >= len(left) or drafts[row] != left[row]), width)
        rounds, drafted, accepted = rounds + 1, drafted + sum(d >= 0 for d in drafts), accepted + agree
        done += min(agree + 1, len(left))
    return rounds, drafted, accepted
