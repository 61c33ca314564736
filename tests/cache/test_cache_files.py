"""The directory of the cache: restarts, files that are not what they seem, writers that are killed."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ninfer_jax.cache.container import BadFile, packed, read_head, read_piece, write
from tests.cache.conftest import IDENTITY, PAGE, PAGE_BYTES, STATE_BYTES, assert_image, keep, turn

PROMPTS = [[1] * 200, [1] * 128 + [2] * 100, [3] * 64, [1] * 128 + [2] * 300, [4] * 30]


def filled(make, folder, prompts=PROMPTS):
    cache = make(folder=folder)
    for prompt in prompts:
        keep(cache, prompt, "branch")
    cache.close()
    return cache


def assert_whole(cache, prompts=PROMPTS, most=None):
    """Every prompt continues from bytes that are its own; all of them from its whole length, unless `most` may be missing."""
    missing = 0
    for prompt in prompts:
        with cache.find(prompt) as hit:
            if (image := hit.load()) is not None:
                assert_image(image, prompt[: hit.length])
            missing += hit.length < len(prompt)
    assert most is None or missing <= most
    cache.check()
    return missing


def test_a_restart_finds_all_that_was_kept(make, tmp_path):
    filled(make, tmp_path / "c")
    again = make(folder=tmp_path / "c")
    again.check()
    assert assert_whole(again) == 0
    assert again.counters.hits_disk == len(PROMPTS) and again.counters.hits_host == 0 and not again.told


def test_only_the_owner_may_read_directory_and_files(make, tmp_path):
    before = os.umask(0)
    try:
        filled(make, tmp_path / "c")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "c").iterdir()} == {0o600}


def test_what_host_memory_has_no_room_for_waits_on_disk(make, tmp_path):
    cache = make(host=STATE_BYTES + 8 * PAGE_BYTES, folder=tmp_path / "c")
    for prompt in PROMPTS:
        assert keep(cache, prompt, "branch")
        cache.check()
    assert cache.counters.spilled >= 3 and cache.counters.evicted == 0
    assert assert_whole(cache) == 0


def test_a_smaller_cap_drops_the_longest_unused(make, tmp_path):
    cache = filled(make, tmp_path / "c", [[who] * PAGE for who in range(8)])
    for age, path in enumerate(sorted((tmp_path / "c").iterdir(), key=lambda p: p.name)):
        os.utime(path, (age, age))
    again = make(folder=tmp_path / "c", disk=cache.counters.disk_bytes // 2)
    again.check()
    assert 0 < len(again.checkpoints) <= 4
    assert again.counters.disk_bytes <= cache.counters.disk_bytes // 2


DAMAGE = {
    "one bit": lambda rng, data: (
        data[: (at := rng.randrange(len(data)))] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    ),
    "cut off": lambda rng, data: data[: rng.randrange(len(data))],
    "appended": lambda rng, data: data + bytes(rng.randint(1, 40)),
    "zeros inside": lambda rng, data: data[: (at := rng.randrange(len(data) - 8))] + bytes(8) + data[at + 8 :],
    "noise": lambda rng, data: rng.randbytes(rng.choice([0, 3, 16, 56, 1000])),
    "another's": lambda rng, data: packed("state", IDENTITY | {"model": "other"}, {}, []),
    "two swapped": lambda rng, data: data[16:] + data[:16],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_and_foreign_files_are_passed_over_by_name(kind, make, tmp_path):
    """1,001 files in all, over the kinds: each is told of by name, or, where what it says of itself is whole, when it is read."""
    rng, folder = random.Random(kind), tmp_path / "c"
    filled(make, folder)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    for count in range(143):
        name = f"{count:032x}.state"
        data = rng.choice(list(whole.values()))
        (folder / name).write_bytes(DAMAGE[kind](rng, data))
    again = make(folder=folder)
    again.check()
    assert assert_whole(again) == 0
    told = [line for line in again.told if not any(name in line for name in whole)]
    assert all(line.startswith("cache_dir: ") and "\n" not in line for line in told) and len(told) == len(set(told))
    # Copies of whole files under other names, damaged in their pieces alone, are useless doubles: those go without a word.
    left = {path.name for path in folder.iterdir()} - set(whole)
    assert all(any(name in line for line in told) for name in left)
    assert len(told) == again.counters.bad_files and (len(told) == 143 or kind in ("one bit", "zeros inside"))


def test_every_damaged_byte_of_the_only_copy_is_a_miss_and_never_another_answer(make, tmp_path):
    rng = random.Random(0)
    for trial in range(150):
        folder = tmp_path / str(trial)
        filled(make, folder)
        path = rng.choice(sorted(folder.iterdir()))
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        again = make(folder=folder)
        assert assert_whole(again) >= 1
        assert len(again.told) == 1 and path.name in again.told[0]


def test_links_pipes_and_directories_are_passed_over(make, tmp_path):
    folder = tmp_path / "c"
    filled(make, folder)
    some = next(folder.iterdir())
    (folder / "link").symlink_to(some)
    os.mkfifo(folder / "pipe")
    (folder / "directory").mkdir()
    again = make(folder=folder)
    assert assert_whole(again) == 0
    assert sorted(line.split(" ")[1].rsplit("/", 1)[1] for line in again.told) == ["directory", "link", "pipe"]


@pytest.mark.parametrize("field", sorted(IDENTITY))
def test_another_engine_uses_nothing_and_leaves_all(field, make, tmp_path):
    filled(make, tmp_path / "c")
    before = {path: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    other = make(folder=tmp_path / "c", identity=IDENTITY | {field: "other"})
    assert other.checkpoints == [] and len(other.told) == len(before)
    assert all(f"{field} is {IDENTITY[field]}, here other" in line for line in other.told)
    assert {path: path.read_bytes() for path in (tmp_path / "c").iterdir()} == before


def test_a_full_disk_ends_the_writing_with_one_line(make, tmp_path, monkeypatch):
    cache, real = make(folder=tmp_path / "c"), os.replace

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for prompt in PROMPTS:
        assert keep(cache, prompt, "branch")
    cache.close()
    monkeypatch.setattr(os, "replace", real)
    assert len(cache.told) == 1 and "No space left on device" in cache.told[0]
    assert assert_whole(cache) == 0 and list((tmp_path / "c").iterdir()) == []


def test_a_place_that_is_no_directory_is_one_line(make, tmp_path):
    (tmp_path / "file").write_text("")
    cache = make(folder=tmp_path / "file")
    assert keep(cache, PROMPTS[0]) and assert_whole(cache, PROMPTS[:1]) == 0
    cache.close()
    assert cache.told and all("file" in line for line in cache.told)


NURSERY = """
import os, pathlib, sys
from ninfer_jax.cache import PrefixCache
from tests.cache.conftest import IDENTITY, PAGE_BYTES, STATE_BYTES, keep, turn
for line in sys.stdin:
    number = int(line)
    if child := os.fork():
        print(child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)
        continue
    cache = PrefixCache(PAGE_BYTES, STATE_BYTES, 4000, folder=pathlib.Path(sys.argv[1]), disk_bytes=60_000, identity=IDENTITY)
    while True:
        number += 1
        keep(cache, turn(number), "branch")
        cache.idle()
"""


def test_a_writer_killed_at_any_point_leaves_nothing_that_is_believed(make, tmp_path):
    """50 times, in one directory: each finds what the last one's death has left. One process forks the writers, because most
    of the time would go into starting Python."""
    rng, folder, found = random.Random(1), tmp_path / "c", 0
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", NURSERY, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as nursery:
        for start in range(50):
            nursery.stdin.write(f"{start * 5}\n")
            nursery.stdin.flush()
            writer = int(nursery.stdout.readline())
            time.sleep(rng.random() * 0.02)
            os.kill(writer, signal.SIGKILL)
            assert nursery.stdout.readline() == "dead\n"
            cache = make(folder=folder, disk=60_000)
            # Temporary files of the dead are gone.
            assert not [path for path in folder.iterdir() if path.name.startswith(".")]
            assert_whole(cache, [turn(number) for number in range(105)])
            assert not cache.told
            found += cache.counters.hits_disk
        nursery.stdin.close()
    assert found > 0


def test_a_container_gives_back_its_pieces_and_nothing_else(tmp_path):
    import numpy as np

    pieces = [np.arange(5, dtype=np.uint8), np.zeros(0, np.uint8), np.full(1000, 7, np.uint8)]
    head = packed("kind", IDENTITY, {"a": 1}, pieces)
    write(tmp_path / "file", head, pieces)
    contents = read_head(tmp_path / "file", IDENTITY)
    assert (contents.kind, contents.fields) == ("kind", {"a": 1})
    assert [read_piece(tmp_path / "file", contents, index).tolist() for index in range(3)] == [piece.tolist() for piece in pieces]
    (tmp_path / "file").write_bytes(head[:-1])
    with pytest.raises(BadFile):
        read_head(tmp_path / "file", IDENTITY)
