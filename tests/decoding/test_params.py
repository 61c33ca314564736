"""SamplingParams: every field refuses what it does not mean, on one line that names the field, and takes its limits."""

from types import MappingProxyType

import pytest

from ninfer_jax.decoding import SamplingParams

NAN, INF = float("nan"), float("inf")

INTEGERS = {  # field -> (lowest, highest) allowed
    "max_new_tokens": (1, 2**31 - 1),
    "top_k": (-1, 2**31 - 1),
    "logprobs": (0, 20),
    "seed": (0, 2**64 - 1),
}
NUMBERS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "repetition_penalty": (0.001, 1000),
}


def refused(**given: object) -> str:
    """The message of the ValueError that `given` raises: one line that starts with the field's name."""
    (name,) = given
    with pytest.raises(ValueError) as error:
        SamplingParams(**given)
    message = str(error.value)
    assert message.startswith(name) and "\n" not in message
    return message


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_have_limits_and_a_type(name: str) -> None:
    low, high = INTEGERS[name]
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (low - 1, high + 1, -(10**30), 10**30, True, False, 1.0, NAN, INF, "1", [1]):
        message = refused(**{name: value})
        assert str(low) in message and str(high) in message


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_limits_and_a_type(name: str) -> None:
    low, high = NUMBERS[name]
    for value in (low, high, float(low), float(high), (low + high) / 2):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (low - 1e-6, high + 1e-3, -(10**400), 10**400, NAN, INF, -INF, True, False, None, "0.5", [0.5]):
        message = refused(**{name: value})
        assert f"{low:g}" in message and f"{high:g}" in message


def test_what_none_may_stand_for() -> None:
    for name in ("max_new_tokens", "logprobs", "seed"):
        assert getattr(SamplingParams(**{name: None}), name) is None
    for name in ("top_k", "stop", "stop_ids", "logit_bias", "ignore_eos"):
        refused(**{name: None})


def test_stop_strings() -> None:
    assert SamplingParams(stop=["a", "\n\n"]).stop == ("a", "\n\n")
    assert SamplingParams(stop=()).stop == ()
    # A bare string would stop at each of its letters; a generator would be empty when it is read a second time.
    for value in ("END", b"END", 5, ("a", ""), ("a", None), ("a", 1), {"a": 1}, (s for s in "ab")):
        refused(stop=value)


def test_stop_ids() -> None:
    assert SamplingParams(stop_ids=[0, 2**31 - 1]).stop_ids == (0, 2**31 - 1)
    assert len(SamplingParams(stop_ids=tuple(range(16))).stop_ids) == 16
    for value in (5, "5", (-1,), (2**31,), (1.0,), (True,), ("5",), (None,), tuple(range(17)), (t for t in (1, 2))):
        refused(stop_ids=value)


def test_logit_bias() -> None:
    biases = {0: -1e4, 2**31 - 1: 1e4, 7: 3}
    assert SamplingParams(logit_bias=biases).logit_bias == biases
    assert SamplingParams(logit_bias=MappingProxyType(biases)).logit_bias == biases
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0)).logit_bias) == 1024
    for value in ([(1, 2.0)], "1", 5, dict.fromkeys(range(1025), 1.0)):
        refused(logit_bias=value)
    for token in (-1, 2**31, 1.0, True, "7", None):
        refused(logit_bias={token: 1.0})
    for bias in (NAN, INF, -INF, 10_001.0, -10_001, True, "1", None):
        assert "logit_bias[7]" in refused(logit_bias={7: bias})


def test_ignore_eos_is_a_bool() -> None:
    assert SamplingParams(ignore_eos=True).ignore_eos is True
    for value in (1, 0, "false", 0.0):
        refused(ignore_eos=value)


def test_the_message_shows_what_was_given() -> None:
    assert "1.5" in refused(top_p=1.5)
    assert "nan" in refused(temperature=NAN)
    assert "'0.5'" in refused(min_p="0.5")
    assert "True" in refused(seed=True)


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5
