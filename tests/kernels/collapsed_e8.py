"""The published 4-bit cache codes that this project does not ship, in NumPy float64, for comparison in tests and benchmarks.

Both turn each 64 dims by an orthonormal Hadamard matrix and store one float16 scale, largest magnitude / 7, per 64 dims:
136 bytes for 256 dims. The "collapsed" code finds the nearest point of the E8 lattice and then rounds it to integers. Half
of that lattice lies at half-integers, and no bit says which half an octet used, so on Gaussian data nearly half of the
octets are stored up to half a step off in every dim.
"""

import numpy as np

GROUP = 64


def hadamard(order: int) -> np.ndarray:
    """Orthonormal Sylvester-Hadamard matrix, entry by entry: the sign is the parity of the bits that row and column share."""
    return np.array([[(-1.0) ** (row & column).bit_count() for column in range(order)] for row in range(order)]) / np.sqrt(order)


def rotate64(x: np.ndarray) -> np.ndarray:
    """`x [..., dims]` with every 64 dims turned by the Hadamard matrix, float64."""
    return (x.astype(np.float64).reshape(*x.shape[:-1], -1, GROUP) @ hadamard(GROUP)).reshape(x.shape)


def _absmax_scaled(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rotated groups `[..., groups, 64]` in units of their float16 scale, and the scales `[..., groups, 1]`."""
    groups = rotate64(x).reshape(*x.shape[:-1], -1, GROUP)
    scales = np.float16(np.abs(groups).max(-1, keepdims=True) / 7).astype(np.float64)
    return np.divide(groups, scales, out=np.zeros_like(groups), where=scales > 0), scales


def _nearest_d8(points: np.ndarray) -> np.ndarray:
    """Nearest integer point with an even sum for `points [n, 8]`; on a tie the first coordinate is moved."""
    nearest = np.rint(points)
    worst = np.abs(points - nearest).argmax(1)
    rows = np.flatnonzero(nearest.sum(1) % 2)
    miss = points[rows, worst[rows]] - nearest[rows, worst[rows]]
    nearest[rows, worst[rows]] += np.where(miss >= 0, 1, -1)
    return nearest


def nearest_e8(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nearest unbounded E8 lattice point of `points [n, 8]`, and whether it lies at half-integers `[n]`."""
    whole, half = _nearest_d8(points), _nearest_d8(points - 0.5) + 0.5
    use_half = ((points - half) ** 2).sum(1) < ((points - whole) ** 2).sum(1)
    return np.where(use_half[:, None], half, whole), use_half


def collapsed_e8_keys(x: np.ndarray) -> np.ndarray:
    """Keys `[..., dims]` after the collapsed code, in the rotated basis: E8 point, rounded half to even, clamped to [-8, 7]."""
    scaled, scales = _absmax_scaled(x)
    lattice, _ = nearest_e8(scaled.reshape(-1, 8))
    codes = np.clip(np.rint(lattice), -8, 7)
    return (codes.reshape(scaled.shape) * scales).reshape(x.shape)


def absmax_int4(x: np.ndarray) -> np.ndarray:
    """Values `[..., dims]` after plain rotated int4 with codes in [-7, 7], in the rotated basis."""
    scaled, scales = _absmax_scaled(x)
    return (np.clip(np.rint(scaled), -7, 7) * scales).reshape(x.shape)
