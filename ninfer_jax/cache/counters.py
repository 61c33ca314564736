"""Numbers that say what the cache did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Since the engine started, but for the bytes held, which are of now.

    lookups: prompts. hits_host, hits_disk: those continued from a checkpoint, by where it lay; failed: whose restore failed,
    a miss. prompt_tokens, cached_host, cached_disk: of all prompts. stored: checkpoints taken; refused: for which there was no
    room. evicted: checkpoints dropped; spilled: those that only left host memory. bad_files: passed over.
    restore_s: seconds that restores took; snapshot_s: that taking checkpoints took, the wait for the chunk before included.
    """

    lookups: int = 0
    hits_host: int = 0
    hits_disk: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_host: int = 0
    cached_disk: int = 0
    stored: int = 0
    refused: int = 0
    evicted: int = 0
    spilled: int = 0
    bad_files: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_written: int = 0
    disk_read: int = 0
    restore_s: float = 0.0
    snapshot_s: float = 0.0

    @property
    def cached_tokens(self) -> int:
        return self.cached_host + self.cached_disk

    @property
    def misses(self) -> int:
        return self.lookups - self.hits_host - self.hits_disk
