"""`convert` where the disk is full or may not be written: one line, before the source is read where that can be known."""

from __future__ import annotations

import errno
import os
import shutil
from types import SimpleNamespace

import formats
import pytest

from ninfer_jax.checkpoints import is_artifact
from ninfer_jax.checkpoints.convert import _Conversion
from ninfer_jax.engine.convert import convert


@pytest.fixture
def source(tmp_path, tensors):
    return formats.plain(tmp_path / "source", tensors)


@pytest.fixture
def unread(monkeypatch):
    """The source's files are not to be read."""

    def digests(self: _Conversion):
        raise AssertionError("the source was read")

    monkeypatch.setattr(_Conversion, "_digests", digests)


def denied(path: object, *arguments: object, **options: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_too_little_room_is_known_beforehand(tmp_path, monkeypatch, source, recipe, refused, unread):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    refused(lambda: convert(source, tmp_path / "made", recipe), tmp_path / "made", "bytes are needed, 1,000 are free on the disk")
    assert not (tmp_path / "made").exists()


def test_a_disk_that_becomes_full(tmp_path, monkeypatch, source, recipe, refused):
    """After some groups: the same command goes on when there is room again."""
    sync, count = os.fsync, [0]

    def fsync(file: int) -> None:
        count[0] += 1
        if count[0] > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    refused(lambda: convert(source, tmp_path / "made", recipe), tmp_path / "made", "No space left on device")
    assert count[0] > 6 and not is_artifact(tmp_path / "made")
    monkeypatch.undo()
    assert convert(source, tmp_path / "made", recipe).load()


def test_no_permission(tmp_path, monkeypatch, source, recipe, refused, unread):
    """The superuser may write anywhere, so the system's answer is given for it."""
    monkeypatch.setattr(os, "mkdir", denied)
    refused(lambda: convert(source, tmp_path / "made", recipe), f"{tmp_path / 'made'}: Permission denied")
    monkeypatch.undo()
    monkeypatch.setattr(_Conversion, "_digests", denied)
    (tmp_path / "made").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(lambda: convert(source, tmp_path / "made", recipe), tmp_path / "made", "Permission denied", "may not be written to")


def test_a_finished_artifact_needs_neither(tmp_path, monkeypatch, source, recipe):
    made = convert(source, tmp_path / "made", recipe)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert convert(source, tmp_path / "made", recipe).manifest == made.manifest
