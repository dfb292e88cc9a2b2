"""A death that nobody waits for is heard of, by events alone: pipes stand for processes."""

from __future__ import annotations

import os
import queue

import pytest

from lazygt.runtime.launch.supervise import DeathWatch

pytestmark = pytest.mark.timeout(60)


class Lives:
    """Pipes: the end of one that is watched can be read when it has ended."""

    def __init__(self) -> None:
        self.pipes: list[tuple[int, int]] = []
        self.ended: set[int] = set()

    def begin(self) -> int:
        self.pipes.append(os.pipe())
        return self.pipes[-1][0]

    def end(self, life: int) -> None:
        self.ended.add(life)
        os.write(dict(self.pipes)[life], b".")

    def living(self) -> list[int]:
        return [life for life, _ in self.pipes if life not in self.ended]

    def close(self) -> None:
        for pipe in self.pipes:
            for descriptor in pipe:
                os.close(descriptor)


def test_each_death_is_heard_of() -> None:
    lives, seen = Lives(), queue.Queue[set[int]]()
    watch = DeathWatch(lives.living, lambda: seen.put(set(lives.ended)))

    def hears_of(*ended: int) -> None:
        while seen.get() != set(ended):
            assert not lives.ended - set(ended)

    first, second = lives.begin(), lives.begin()
    watch.start()
    lives.end(first)
    hears_of(first)
    third = lives.begin()
    watch.processes_changed()
    lives.end(third)  # perhaps before it is watched
    hears_of(first, third)
    lives.end(second)
    hears_of(first, second, third)
    watch.end()
    lives.close()


def test_death_watch_ends_while_workers_live() -> None:
    lives, looks = Lives(), queue.Queue[None]()
    lives.begin()
    before = len(os.listdir("/proc/self/fd"))
    watch = DeathWatch(lives.living, lambda: looks.put(None))
    watch.start()
    looks.get()
    watch.end()
    assert not watch.is_alive()
    assert looks.qsize() <= 1  # it sleeps while nobody dies
    assert len(os.listdir("/proc/self/fd")) == before
    lives.close()
