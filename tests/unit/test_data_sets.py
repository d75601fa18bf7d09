"""Sets that need no file, and how much memory is free for one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.data import Images, sample
from lockstep.data.room import free_memory
from lockstep.data.source import Part, Source
from lockstep.data.synthetic import digits, synthetic


def images(source: Source, part: Part) -> Images:
    """Return the pictures of a part."""
    pixels = torch.empty(part.count, 3, source.size, source.size, dtype=torch.uint8)
    for _ in part.fill(pixels):
        pass
    return Images(pixels, part.labels, source.mean, source.deviation, source.classes)


def test_synthetic_pictures_are_always_the_same() -> None:
    """Whatever has been drawn before; another seed gives others; the numbers are known."""
    one, torch_state = synthetic(), torch.get_rng_state()
    first = images(one, one.test)
    assert torch.equal(torch.get_rng_state(), torch_state)
    torch.rand(5)
    assert torch.equal(images(one, one.test).images, first.images)
    again = synthetic()
    assert torch.equal(images(again, again.test).images, first.images)
    other = synthetic(seed=2)
    assert not torch.equal(images(other, other.test).images, first.images)
    assert len(first) == 2_000
    assert torch.bincount(first.labels).tolist() == [200] * 10


@pytest.mark.parametrize("size", [32, 21])
def test_synthetic_pictures_can_be_learned(size: int) -> None:
    """The nearest of the means of the training images tells most test images, not by chance."""
    source = synthetic(size)
    train, test = images(source, source.train), images(source, source.test)
    assert not (train.images[:2000] == test.images).flatten(1).all(dim=1).any()
    x, y = train.batch(slice(0, 1000))
    means = torch.stack([x[y == kind].mean(dim=0) for kind in range(10)]).flatten(1)
    found = torch.cdist(test.batch(slice(None))[0].flatten(1), means).argmin(dim=1)
    assert (found == test.labels).float().mean() > 0.9
    everything = train.batch(slice(None))[0]
    assert abs(everything.mean().item()) < 0.1
    assert abs(everything.std().item() - 1) < 0.05


def test_digits_as_pictures() -> None:
    """The digits in the middle, paper around, three equal colours, the same labels."""
    source = digits()
    train = images(source, source.train)
    plain, _ = sample.load()
    assert torch.equal(train.labels, plain.labels)
    for colour in range(3):
        assert torch.equal(train.images[:, colour, 2:30, 2:30], plain.images[:, 0])
    assert train.images.sum() == 3 * plain.images.sum()
    x, _ = train.batch(slice(None))
    assert abs(x.mean().item()) < 0.02
    assert abs(x.std().item() - 1) < 0.02


def make(root: Path, files: dict[str, str]) -> Path:
    """Write what the kernel would show."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       32000000 kB\nMemAvailable:   1000000 kB\nShmem: 5 kB\n"


def test_free_memory_here() -> None:
    """More than nothing, and no more than the machine has."""
    text = Path("/proc/meminfo").read_text()
    assert 0 < free_memory() <= int(text.split()[1]) << 10


def test_free_memory_without_groups(tmp_path: Path) -> None:
    """What the machine has left."""
    assert free_memory(make(tmp_path, {"proc/meminfo": MEMINFO})) == 1_000_000 << 10


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"": "max", "/job": "max", "/job/step": "max"}, 1_000_000 << 10),
        ({"/job": "max", "/job/step": "5000000"}, 5_000_000 - 3_000_000 + 1_000_000),
        ({"/job": "4000000", "/job/step": "max"}, 4_000_000 - 3_000_000 + 1_000_000),
        ({"/job/step": "1000"}, 0),
    ],
)
def test_free_memory_of_a_group(tmp_path: Path, limits: dict[str, str], expected: int) -> None:
    """The tightest group counts, of those that have a limit; what files keep can be had back."""
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/job/step\n"}
    for group, limit in limits.items():
        files[f"sys/fs/cgroup{group}/memory.max"] = f"{limit}\n"
        files[f"sys/fs/cgroup{group}/memory.current"] = "3000000\n"
        files[f"sys/fs/cgroup{group}/memory.stat"] = "anon 7\ninactive_file 1000000\n"
    assert free_memory(make(tmp_path, files)) == expected


def test_free_memory_of_an_older_group(tmp_path: Path) -> None:
    """Version 1 has other names."""
    group = "sys/fs/cgroup/memory/job"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/\n",
        f"{group}/memory.limit_in_bytes": "9000000\n",
        f"{group}/memory.usage_in_bytes": "2000000\n",
        f"{group}/memory.stat": "inactive_file 1\ntotal_inactive_file 500000\n",
    }
    assert free_memory(make(tmp_path, files)) == 7_500_000
