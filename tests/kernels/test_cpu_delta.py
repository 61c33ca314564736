"""The delta rule's CPU kernels: numbers against float64 written from the op's description, and bits against themselves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.delta_decode import delta_decode
from pallas_kernels.delta_fold import delta_fold

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of a call; the ring has room for passes of six rows."""

    slots: int = 3
    key_heads: int = 2
    value_heads: int = 6
    key_dim: int = 48
    value_dim: int = 80
    width: int = 3
    ring: int = 12
    dtype: str = "float32"

    @property
    def keys(self):
        return self.key_heads * self.key_dim

    @property
    def values(self):
        return self.value_heads * self.value_dim

    @property
    def channels(self):
        return 2 * self.keys + self.values

    def split(self, record):
        """k, v, decay and beta of records `[..., columns]`."""
        ends = np.cumsum([self.keys, self.values, self.value_heads])
        k, v, decay, beta = np.split(record, ends, axis=-1)
        return k.reshape(*k.shape[:-1], -1, self.key_dim), v.reshape(*v.shape[:-1], -1, self.value_dim), decay, beta


ODD = Layer()
REAL = Layer(slots=2, key_heads=16, value_heads=48, key_dim=128, value_dim=128, width=4)
BF16 = Layer(slots=2, key_heads=1, value_heads=2, key_dim=32, value_dim=32, width=4, dtype="bfloat16")


def draw(layer, rows, seed=0):
    """Arguments as the model makes them, up to start and count: those are the test's."""
    rng = np.random.default_rng(seed)
    tokens, heads = layer.slots * rows, layer.value_heads

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    k = normal(layer.slots, layer.ring, layer.key_heads, layer.key_dim)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gates = 1 / (1 + np.exp(-2 - normal(layer.slots, layer.ring, 2 * heads)))
    records = np.concatenate([k.reshape(*k.shape[:2], -1), normal(layer.slots, layer.ring, layer.values), gates], -1)
    return dict(
        projected=normal(tokens, layer.channels + layer.values).astype(layer.dtype),
        ab=2 * normal(tokens, 2 * heads).astype(layer.dtype),
        conv=normal(layer.slots, layer.ring, layer.channels).astype(layer.dtype),
        recurrent=0.1 * normal(layer.slots, heads, layer.key_dim, layer.value_dim),
        records=records,
        start=np.zeros(layer.slots, np.int32),
        count=np.zeros(layer.slots, np.int32),
        taps=0.4 * normal(layer.channels, 1, layer.width),
        a_log=normal(heads),
        dt_bias=normal(heads),
        norm=1 + 0.2 * normal(layer.value_dim),
    )


@functools.partial(jax.jit, static_argnames="rows", donate_argnums=0)
def _decode(changing, fixed, rows):
    arguments = fixed | changing
    names = ("projected", "ab", "conv", "recurrent", "records", "start", "count", "taps", "a_log", "dt_bias", "norm")
    return delta_decode(*(arguments[n] for n in names), jnp.int32(0), rows=rows, eps=EPS, impl="cpu")


def decode(arguments, rows):
    """out, conv, recurrent and records as NumPy arrays; the arguments stay as they are."""
    own = {n: jnp.array(a) for n, a in arguments.items()}
    changing = {n: own.pop(n) for n in ("conv", "recurrent", "records")}
    return dict(zip(("out", "conv", "recurrent", "records"), map(np.array, _decode(changing, own, rows)), strict=True))


@functools.partial(jax.jit, static_argnames="width", donate_argnums=(0, 1))
def _fold(recurrent, conv, records, start, count, width):
    return delta_fold(recurrent, conv, records, start, count, jnp.int32(0), width=width, impl="cpu")


def fold(layer, arguments):
    own = [jnp.array(arguments[n]) for n in ("recurrent", "conv", "records", "start", "count")]
    return dict(zip(("recurrent", "conv"), map(np.array, _fold(*own, layer.width)), strict=True))


def silu(x):
    return x / (1 + np.exp(-x))


def step(state, k, v, decay, beta):
    """One head's transition, in place."""
    state *= decay
    state += np.outer(k, beta * (v - k @ state))


def exact(layer, arguments, rows):
    """What a call should give, float64; of bfloat16 inputs only the convolution is rounded."""
    a = {n: np.array(x, np.float64) for n, x in arguments.items()}
    start, count = arguments["start"], arguments["count"]
    conv, state, records = a["conv"], a["recurrent"], a["records"]
    share, kept = layer.value_heads // layer.key_heads, layer.width - 1
    out = np.zeros((layer.slots * rows, layer.value_heads, layer.value_dim))
    for slot in range(layer.slots):
        if count[slot] < 0:
            continue
        for i in range(count[slot]):
            k, v, decay, beta = layer.split(records[slot, (start[slot] + i) % layer.ring])
            for h in range(layer.value_heads):
                step(state[slot, h], k[h // share], v[h], decay[h], beta[h])
        current, at = state[slot].copy(), start[slot] + count[slot]
        for row in range(rows):
            token, place = slot * rows + row, (at + row) % layer.ring
            raw, z = np.split(a["projected"][token], [layer.channels])
            conv[slot, (at + kept + row) % layer.ring] = raw
            window = conv[slot, (at + row + np.arange(layer.width)) % layer.ring]
            mixed = silu((window * a["taps"][:, 0].T).sum(0))
            if layer.dtype == "bfloat16":
                mixed = mixed.astype(ml_dtypes.bfloat16).astype(np.float64)
            q, k, v = np.split(mixed, [layer.keys, 2 * layer.keys])
            q, k = (x.reshape(-1, layer.key_dim) for x in (q, k))
            q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
            v, z = v.reshape(-1, layer.value_dim), z.reshape(-1, layer.value_dim)
            wa, wb = np.split(a["ab"][token], 2)
            decay, beta = np.exp(-np.exp(a["a_log"]) * np.logaddexp(0, wa + a["dt_bias"])), 1 / (1 + np.exp(-wb))
            records[slot, place] = np.concatenate([x.reshape(-1) for x in (k, v, decay, beta)])
            for h in range(layer.value_heads):
                step(current[h], k[h // share], v[h], decay[h], beta[h])
                x = q[h // share] @ current[h] / np.sqrt(layer.key_dim)
                out[token, h] = x / np.sqrt((x**2).mean() + EPS) * a["norm"] * silu(z[h])
    return {"out": out.reshape(len(out), -1), "conv": conv, "recurrent": state, "records": records}


def same(got, want):
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


def near(got, want, tolerance, name=""):
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want), name


@pytest.mark.parametrize("layer, rows", [(ODD, 1), (ODD, 5), (REAL, 4)], ids=["odd-1", "odd-5", "real-4"])
def test_equals_the_float64_formulas(layer, rows):
    """Full rings that wrap, none waiting, and a slot that takes no part. Of a sum of n terms, errors of 2^-24 each and of any
    sign come to sqrt(n) of them; a row passes through as many sums as rows are before it."""
    arguments = draw(layer, rows)
    arguments["start"][:] = np.arange(layer.slots) * 5 + 7
    arguments["start"] %= layer.ring
    arguments["count"][:] = [layer.ring - rows, 0, -1][: layer.slots]
    got, want = decode(arguments, rows), exact(layer, arguments, rows)
    tolerance = 2 * layer.ring * np.sqrt(layer.key_dim) * 2**-24
    same(got["conv"], want["conv"].astype(np.float32))
    for name in ("out", "recurrent", "records"):
        near(got[name], want[name], tolerance, name)
    for x, y in zip(layer.split(got["records"]), layer.split(want["records"]), strict=True):
        near(x, y, tolerance)


def test_bfloat16_projections_are_rounded_where_the_model_rounds():
    """2^-9 for the result, as much for the norm, and inputs where float32 and float64 fall on two sides of a rounding."""
    arguments = draw(BF16, 2)
    arguments["count"][:] = 2, 0
    got, want = decode(arguments, 2), exact(BF16, arguments, 2)
    assert got["out"].dtype == got["conv"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float64(got["conv"]), want["conv"])
    near(got["out"], want["out"], 4e-3)
    near(got["recurrent"], want["recurrent"], 1e-5)


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 6])
def test_rows_together_have_the_bits_of_rows_one_by_one(rows):
    """One pass of `rows`; or as many passes of one, each row entering the state in the next. Then all of it settled."""
    arguments = draw(ODD, rows)
    arguments["start"][:], arguments["count"][:] = [10, 3, 0], [2, 0, 4]
    together = decode(arguments, rows)
    split = {n: arguments[n].reshape(ODD.slots, rows, -1) for n in ("projected", "ab")}
    alone, outs = dict(arguments), []
    for row in range(rows):
        alone |= {n: np.ascontiguousarray(x[:, row]) for n, x in split.items()}
        step = decode(alone, 1)
        outs.append(step.pop("out"))
        alone |= step | {"start": (alone["start"] + alone["count"]) % ODD.ring, "count": np.ones(ODD.slots, np.int32)}
    same(np.stack(outs, 1).reshape(together["out"].shape), together["out"])
    for name in ("conv", "records"):
        same(alone[name], together[name])
    settled = {"start": (arguments["start"] + arguments["count"]) % ODD.ring, "count": np.full(ODD.slots, rows, np.int32)}
    both = [fold(ODD, arguments | x) for x in (together | settled, alone)]
    same(both[0]["recurrent"], both[1]["recurrent"])
    same(both[0]["conv"][:, : ODD.width - 1], both[1]["conv"][:, : ODD.width - 1])


def test_a_slot_has_the_same_bits_alone_and_beside_others():
    arguments = draw(ODD, 3, seed=1)
    arguments["start"][:], arguments["count"][:] = [11, 4, 6], [5, -1, 9]
    for name in ("conv", "recurrent", "records"):
        arguments[name][1] = np.nan  # takes no part: may hold anything
    together = decode(arguments, 3)
    assert not together["out"][3:6].any()
    for name in ("conv", "recurrent", "records"):
        same(together[name][1], arguments[name][1])
    for slot in (0, 2):
        own = {n: a[slot * 3 : slot * 3 + 3] if n in ("projected", "ab") else a for n, a in arguments.items()}
        own |= {n: own[n][slot : slot + 1] for n in ("conv", "recurrent", "records", "start", "count")}
        alone = decode(own, 3)
        same(alone["out"], together["out"][slot * 3 : slot * 3 + 3])
        for name in ("conv", "recurrent", "records"):
            same(alone[name][0], together[name][slot])


def test_rows_that_do_not_wait_are_not_read():
    arguments = draw(ODD, 2, seed=2)
    arguments["start"][:], arguments["count"][:] = 9, 2
    want = decode(arguments, 2)
    places = np.arange(ODD.ring)
    for name, kept in (("records", [9, 10]), ("conv", [11, 0])):
        arguments[name][:, np.setdiff1d(places, kept)] = np.nan
    got = decode(arguments, 2)
    for name in ("out", "recurrent"):
        same(got[name], want[name])
    same(got["records"][:, [9, 10, 11, 0]], want["records"][:, [9, 10, 11, 0]])


def test_settling_equals_float64_and_leaves_slots_alone():
    """All that a ring holds, nothing, and a slot that takes no part."""
    layer = REAL
    arguments = draw(layer, 1, seed=3)
    arguments["start"][:], arguments["count"][:] = [7, 3], [11, -1]
    got = fold(layer, arguments)
    state = np.float64(arguments["recurrent"][0])
    for i in range(11):
        k, v, decay, beta = layer.split(np.float64(arguments["records"][0, (7 + i) % layer.ring]))
        for h in range(layer.value_heads):
            step(state[h], k[h // 3], v[h], decay[h], beta[h])
    near(got["recurrent"][0], state, 2 * layer.ring * np.sqrt(layer.key_dim) * 2**-24)
    same(got["conv"][0, :3], arguments["conv"][0, (18 + np.arange(3)) % layer.ring])
    same(got["recurrent"][1], arguments["recurrent"][1])
    same(got["conv"][1], arguments["conv"][1])
    arguments["count"][:] = 0
    same(fold(layer, arguments)["recurrent"], arguments["recurrent"])


def test_gates_at_their_ends_and_inputs_of_zero():
    """Decays from 0 to 1, beta from 0 to 1, q, k and v of zero: nothing overflows, nothing is divided by zero."""
    arguments = draw(ODD, 2, seed=4)
    arguments["ab"] *= 60
    arguments["projected"][:2, : ODD.channels] = 0
    arguments["conv"][0] = 0
    got = decode(arguments, 2)
    assert all(np.isfinite(x).all() for x in got.values())
    k, _, decay, beta = ODD.split(got["records"][:, :2])
    assert not k[0].any()
    assert decay.min() == 0 and decay.max() == 1 and beta.max() == 1


def test_states_and_rings_change_in_place():
    arguments = {n: jnp.array(a) for n, a in draw(ODD, 1).items()}
    changing = {n: arguments.pop(n) for n in ("conv", "recurrent", "records")}
    pointers = [a.unsafe_buffer_pointer() for a in changing.values()]
    _, *after = _decode(changing, arguments, 1)
    assert [a.unsafe_buffer_pointer() for a in after] == pointers


def test_heads_that_do_not_fit_are_named():
    layer = dataclasses.replace(ODD, value_dim=24)
    with pytest.raises(ValueError, match=r"^delta_decode: key_dim 48 and value_dim 24 must be multiples of 16"):
        decode(draw(layer, 1), 1)
    with pytest.raises(ValueError, match=r"^delta_fold: key_dim 48 and value_dim 24 must be multiples of 16"):
        fold(layer, draw(layer, 1))
