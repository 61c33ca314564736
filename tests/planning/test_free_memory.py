"""Bytes that are free on a CPU: what Linux has available, and what control groups leave of it."""

from __future__ import annotations

import pytest

from ninfer_jax.planning.host_memory import available_bytes, group_bytes


@pytest.fixture
def linux(tmp_path):
    """A tree of files by path from the root, `root`."""

    def write(files: dict[str, str]):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def test_what_linux_says_is_available(linux, tmp_path):
    assert available_bytes(tmp_path) is None
    root = linux({"proc/meminfo": "MemTotal:       24689764 kB\nMemAvailable:   20000000 kB\nHugePages_Total:       0\n"})
    assert available_bytes(root) == 20_480_000_000


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        # Version 2: each group on the way up may have a limit, and files that were read count as free.
        (
            "0::/user/mine\n",
            {
                "user/mine/memory.max": "3000000\n",
                "user/mine/memory.current": "2500000\n",
                "user/mine/memory.stat": "anon 700000\ninactive_file 1000000\nactive_file 800000\n",
                "user/memory.max": "9000000\n",
                "user/memory.current": "8000000\n",
                "memory.max": "max\n",
                "memory.current": "1\n",
            },
            [1_000_000, 2_300_000],
        ),
        # A container's own group is its root, whatever it is called outside.
        ("0::/\n", {"memory.max": "5000000\n", "memory.current": "6000000\n"}, [0]),
        (
            "4:memory:/docker/1f\n3:cpuset:/\n",
            {"memory/memory.limit_in_bytes": "7000000\n", "memory/memory.usage_in_bytes": "1000000\n"},
            [6_000_000],
        ),
        ("0::/\n", {}, []),
    ],
    ids=["nested", "container", "version1", "unlimited"],
)
def test_what_control_groups_leave(linux, own, files, left):
    root = linux({"proc/self/cgroup": own} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert sorted(group_bytes(root)) == left
