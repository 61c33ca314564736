"""Versions of the NVIDIA driver, and facts of the first visible card, by its own words: JAX is neither started nor asked."""

from __future__ import annotations

import ctypes


def cuda_version() -> tuple[int, int] | None:
    """(major, minor) of the newest CUDA that the driver serves; None where no driver answers or it finds no card."""
    cuda, version = _library(), ctypes.c_int()
    if cuda is None or cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


def card_memory() -> tuple[int, int] | None:
    """(free, total) bytes of the first visible card; None where there is none."""
    cuda = _library()
    if cuda is None:
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    # The primary context is the one that JAX will use too, so that what is free is what is free beside it.
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    try:
        if cuda.cuCtxPushCurrent_v2(context):
            return None
        failed = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        return None if failed else (free.value, total.value)
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)


def card_name() -> str | None:
    """The first visible card's name by its driver ("NVIDIA GeForce RTX 4090"); None where there is none."""
    cuda, device, name = _library(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDeviceGetName(name, 256, device):
        return None
    return name.value.decode(errors="replace")


def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
