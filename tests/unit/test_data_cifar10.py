"""CIFAR-10 in the batches of its authors: read, checked, fetched."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.data import cifar10
from lockstep.data.source import Part
from lockstep.errors import DataError

NAMES = [f"class {number}" for number in range(10)]


def old(thing: object) -> bytes:
    """Pickle as Python 2 did, with which the batches were made: text is bytes."""
    if isinstance(thing, str | bytes):
        raw = thing.encode() if isinstance(thing, str) else thing
        return b"T" + len(raw).to_bytes(4, "little") + raw
    if isinstance(thing, int):
        return b"J" + thing.to_bytes(4, "little", signed=True)
    if isinstance(thing, list):
        return b"](" + b"".join(map(old, thing)) + b"e"
    if isinstance(thing, dict):
        return b"}(" + b"".join(old(key) + old(value) for key, value in thing.items()) + b"u"
    assert isinstance(thing, np.ndarray)
    kind = b"cnumpy\ndtype\n(" + old("u1") + old(0) + old(1) + b"tR"
    kind += b"(" + old(3) + old("|") + b"NNN" + old(-1) + old(-1) + old(0) + b"tb"
    shape = b"(" + b"".join(map(old, thing.shape)) + b"t"
    begin = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + old(0) + b"t"
    return (
        begin + old("b") + b"tR(" + old(1) + shape + kind + b"\x89" + old(thing.tobytes()) + b"tb"
    )


def packed(thing: object, style: str) -> bytes:
    """Pickle in the style of Python 2, or as Python 3 and numpy 2 do it."""
    return b"\x80\x02" + old(thing) + b"." if style == "old" else pickle.dumps(thing, protocol=2)


def batch(seed: int, n: int = 4) -> dict[str, object]:
    """Return noise in the layout of a batch."""
    random = np.random.default_rng(seed)
    data = random.integers(256, size=(n, 3072), dtype=np.uint8)
    labels = random.integers(10, size=n).tolist()
    return {"batch_label": f"batch {seed}", "labels": labels, "data": data, "filenames": ["a"] * n}


def write(folder: Path, style: str = "old", sums: bool = True) -> dict[str, dict[str, object]]:
    """Write a small set with its checksums."""
    folder.mkdir(parents=True)
    made = {f"data_batch_{number}": batch(number) for number in range(1, 6)}
    made["test_batch"] = batch(6, n=3)
    made["batches.meta"] = {"label_names": NAMES, "num_vis": 3072}
    lines = []
    for name, content in made.items():
        raw = packed(content, style)
        (folder / name).write_bytes(raw)
        lines.append(f"{hashlib.md5(raw).hexdigest()}  {name}\n")
    if sums:
        (folder / "MD5SUMS").write_text("".join(lines))
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a small set."""
    place = tmp_path / "cifar-10-batches-py"
    write(place)
    return place


def pixels(part: Part) -> torch.Tensor:
    """Return the pictures of a part."""
    found = torch.empty(part.count, 3, 32, 32, dtype=torch.uint8)
    for _ in part.fill(found):
        pass
    return found


@pytest.mark.parametrize("style", ["old", "new"])
def test_a_set_is_read(tmp_path: Path, style: str) -> None:
    """All batches in order, whichever Python made them; nothing is written or fetched."""
    place = tmp_path / "cifar-10-batches-py"
    made = write(place, style)
    before = {path: path.stat().st_mtime_ns for path in [place, *place.iterdir()]}
    assert list(cifar10.fetch(tmp_path, 1.0)) == []
    source = cifar10.load(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in [place, *place.iterdir()]} == before
    assert source.classes == tuple(NAMES)
    for part, names in ((source.train, list(made)[:5]), (source.test, ["test_batch"])):
        expected = np.concatenate([made[name]["data"] for name in names])
        assert np.array_equal(pixels(part).numpy().reshape(-1, 3072), expected)
        assert part.labels.tolist() == [mark for name in names for mark in made[name]["labels"]]


def test_the_style_of_python_2_is_what_a_plain_reader_reads() -> None:
    """The writer of this test is right: Python's own reader finds the same."""
    made = batch(1)
    found = pickle.loads(packed(made, "old"), encoding="latin1")
    assert np.array_equal(found.pop("data"), made.pop("data"))
    assert found == made


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
@pytest.mark.parametrize("how", ["cut", "changed", "empty"])
def test_a_damaged_file_is_named(folder: Path, name: str, how: str) -> None:
    """And left as it is."""
    content = (folder / name).read_bytes()
    middle = len(content) // 2
    spoilt = {
        "cut": content[:-7],
        "changed": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "empty": b"",
    }[how]
    (folder / name).write_bytes(spoilt)
    with pytest.raises(DataError, match=rf"{name} is damaged: {len(spoilt)} bytes with the MD5"):
        cifar10.load(folder.parent)
    assert (folder / name).read_bytes() == spoilt


def test_the_sums_of_the_original_hold_without_others(folder: Path) -> None:
    """A set that is not the original needs its own."""
    (folder / "MD5SUMS").unlink()
    with pytest.raises(DataError, match="data_batch_1 is damaged") as caught:
        cifar10.load(folder.parent)
    assert cifar10.CHECKSUMS["data_batch_1"] in caught.value.needed


def test_a_missing_file_is_named(folder: Path) -> None:
    """Though all the others are there."""
    (folder / "data_batch_2").unlink()
    with pytest.raises(DataError, match="data_batch_2 is missing"):
        cifar10.load(folder.parent)


@pytest.mark.parametrize("text", ["", "no sum\n", "1 2 3\n", "ab  test_batch\n"])
def test_sums_that_make_no_sense(folder: Path, text: str) -> None:
    """The file of sums is named."""
    (folder / "MD5SUMS").write_text(text)
    with pytest.raises(DataError, match="MD5SUMS is damaged"):
        cifar10.load(folder.parent)


class _Calls:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("owned",)


@pytest.mark.parametrize(
    "content",
    [
        _Calls(),
        {"label_names": _Calls()},
        [1, 2],
        {"labels": [1], "data": np.zeros((1, 3072))},
        {"labels": [1], "data": np.zeros((1, 3071), dtype=np.uint8)},
        {"labels": [1, 2], "data": np.zeros((1, 3072), dtype=np.uint8)},
        {"labels": [10], "data": np.zeros((1, 3072), dtype=np.uint8)},
        {"labels": ["1"], "data": np.zeros((1, 3072), dtype=np.uint8)},
        {"data": np.zeros((1, 3072), dtype=np.uint8)},
    ],
)
def test_what_is_no_batch(folder: Path, content: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a checksum that fits: it is named, and nothing in it is called."""
    monkeypatch.chdir(folder.parent)
    raw = pickle.dumps(content, protocol=2)
    for name in ("data_batch_2", "test_batch", "batches.meta"):
        lines = (folder / "MD5SUMS").read_text().splitlines()
        kept = [line for line in lines if not line.endswith(name)]
        original = (folder / name).read_bytes()
        (folder / name).write_bytes(raw)
        (folder / "MD5SUMS").write_text(
            "\n".join([*kept, f"{hashlib.md5(raw).hexdigest()} *{name}"])
        )
        with pytest.raises(DataError, match=f"{name} is damaged"):
            cifar10.load(folder.parent)
        (folder / name).write_bytes(original)
        (folder / "MD5SUMS").write_text("\n".join(lines))
    assert not (folder.parent / "owned").exists()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an archive that torchvision downloads, with checksums that fit."""
    from torchvision.datasets import CIFAR10

    place = tmp_path / "mirror"
    write(place / "cifar-10-batches-py", sums=False)
    packed_ = place / CIFAR10.filename
    with tarfile.open(packed_, "w:gz") as tar:
        tar.add(place / "cifar-10-batches-py", "cifar-10-batches-py")
    files = (place / "cifar-10-batches-py").iterdir()
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in sorted(files)}
    handler = functools.partial(_Quiet, directory=str(place))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setattr(cifar10, "CHECKSUMS", sums)
        address = f"http://127.0.0.1:{server.server_port}/{CIFAR10.filename}"
        monkeypatch.setattr(CIFAR10, "url", address)
        monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(packed_.read_bytes()).hexdigest())
        listed = [[name, value] for name, value in sums.items()]
        monkeypatch.setattr(CIFAR10, "train_list", [it for it in listed if "data" in it[0]])
        monkeypatch.setattr(CIFAR10, "test_list", [it for it in listed if "test" in it[0]])
        monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield packed_
        server.shutdown()


def fetched(directory: Path) -> set[str]:
    """Fetch, and return what lies in the folder then."""
    for _ in cifar10.fetch(directory, 10.0):
        pass
    return {path.name for path in (directory / "cifar-10-batches-py").iterdir()}


def test_it_is_downloaded(tmp_path: Path, archive: Path) -> None:
    """All files, and nothing else is left behind."""
    assert fetched(tmp_path / "new") == {".lock", *cifar10.CHECKSUMS}
    assert cifar10.load(tmp_path / "new").train.count == 20


def test_an_archive_that_was_copied_is_used(tmp_path: Path, archive: Path) -> None:
    """Without a network; one that is damaged is named and left as it is."""
    (tmp_path / "new").mkdir()
    copy = tmp_path / "new" / archive.name
    copy.write_bytes(archive.read_bytes())
    archive.unlink()
    assert ".lock" in fetched(tmp_path / "new")
    assert cifar10.load(tmp_path / "new").test.count == 3
    (tmp_path / "new" / "cifar-10-batches-py" / "test_batch").unlink()
    copy.write_bytes(copy.read_bytes()[:-9])
    cut = copy.read_bytes()
    with pytest.raises(DataError, match=rf"{archive.name} is damaged: MD5 sum"):
        fetched(tmp_path / "new")
    assert copy.read_bytes() == cut


def test_a_broken_download_is_named(tmp_path: Path, archive: Path) -> None:
    """It was cut off on the way: the checksum of the archive does not fit."""
    archive.write_bytes(archive.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        fetched(tmp_path / "new")
    assert archive.name in str(caught.value)
    left = {path.name for path in (tmp_path / "new" / "cifar-10-batches-py").iterdir()}
    assert left == {".lock"}
