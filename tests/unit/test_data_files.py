"""Image files: decoded, scaled, listed by their folders, and what is said of bad ones."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.decode import decode, fill
from lockstep.data.tree import scan
from lockstep.errors import DataError


def picture(height: int = 32, width: int = 32, seed: int = 1) -> Image.Image:
    """Return a smooth picture with three colours."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(256, size=(5, 5, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def packed(image: Image.Image, kind: str, **options: object) -> bytes:
    """Return the bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)  # type: ignore[arg-type]
    return file.getvalue()


def pixels(image: Image.Image) -> torch.Tensor:
    """Return uint8 [3, H, W], as Pillow sees it."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def decoded(tmp_path: Path, content: bytes, name: str = "a.jpg", size: int = 32) -> torch.Tensor:
    """Decode the content of a file."""
    (tmp_path / name).write_bytes(content)
    return decode(str(tmp_path / name), size)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK", "1"])
def test_formats_and_colours(tmp_path: Path, kind: str, mode: str) -> None:
    """What Pillow makes of it, to the bit; grey is three equal colours."""
    try:
        content = packed(picture().convert(mode), kind)
    except (OSError, ValueError):
        with pytest.raises((OSError, ValueError)):
            packed(picture().convert(mode), kind)
        return  # there are no such files
    expected = pixels(Image.open(io.BytesIO(content)))
    found = decoded(tmp_path, content)
    assert found.dtype == torch.uint8
    assert torch.equal(found, expected)


def test_sixteen_bits_are_scaled(tmp_path: Path) -> None:
    """Not cut off at 255."""
    values = np.arange(1024, dtype=np.uint16).reshape(32, 32) * 64
    found = decoded(tmp_path, packed(Image.fromarray(values), "PNG"), "a.png")
    expected = torch.from_numpy((values >> 8).astype(np.int32))
    assert (found.int() - expected).abs().max() <= 1


@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 96), (90, 45), (20, 20), (1, 300)])
def test_other_sizes_are_cropped_and_scaled(tmp_path: Path, height: int, width: int) -> None:
    """The square in the middle, as Pillow scales it."""
    image, side = picture(height, width), min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    expected = pixels(square.resize((32, 32), Image.Resampling.BILINEAR))
    found = decoded(tmp_path, packed(image, "PNG"), "a.png")
    assert found.shape == (3, 32, 32)
    assert (found.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("GIF", {}), ("BMP", {})],
)
def test_a_file_cut_off_at_any_byte(tmp_path: Path, kind: str, options: dict[str, object]) -> None:
    """It is named, or it is complete but for marks after the last pixel."""
    content = packed(picture(), kind, **options)
    whole = decoded(tmp_path, content)
    refused = 0
    for length in range(0, len(content), max(1, len(content) // 60)):
        (tmp_path / "cut.jpg").write_bytes(content[:length])
        try:
            found = decode(str(tmp_path / "cut.jpg"), 32)
        except DataError as error:
            refused += "cut.jpg cannot be read as an image" in str(error)
        else:
            assert torch.equal(found, whole)
    assert refused >= 55


def test_what_is_no_image(tmp_path: Path) -> None:
    """Empty, text, a directory, a link to nowhere: named."""
    for content in (b"", b"text", b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n" + b"\0" * 50):
        with pytest.raises(DataError, match=r"a\.jpg cannot be read as an image"):
            decoded(tmp_path, content)
    (tmp_path / "b.jpg").mkdir()
    (tmp_path / "c.jpg").symlink_to("nowhere")
    os.mkfifo(tmp_path / "e.jpg")  # to open it would wait for a writer
    for name in ("b.jpg", "c.jpg", "d.jpg", "e.jpg"):
        with pytest.raises(DataError, match=f"{name} cannot be read as an image"):
            decode(str(tmp_path / name), 32)


def make(root: Path, counts: dict[str, int], size: int = 32) -> list[torch.Tensor]:
    """Write images into folders; return their pixels in the order of their names."""
    made = []
    for seed, (folder, count) in enumerate(sorted(counts.items())):
        (root / folder).mkdir(parents=True)
        for number in range(count):
            content = packed(picture(size, size, 100 * seed + number), "PNG")
            (root / folder / f"{number:03}.png").write_bytes(content)
            made.append(pixels(Image.open(io.BytesIO(content))))
    return made


COUNTS = {"test/ant": 2, "test/bee": 3, "train/ant": 70, "train/bee": 81}


def test_a_tree_is_listed_and_decoded(tmp_path: Path) -> None:
    """Every image once, with the label of its folder; several threads, each image in its place."""
    made = make(tmp_path, COUNTS)
    (tmp_path / "train" / "README").write_text("no folder")
    (tmp_path / "train" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".hidden").mkdir()
    source = scan(tmp_path).source(32, {0, 1})
    assert source.classes == ("ant", "bee")
    assert source.train.labels.tolist() == [0] * 70 + [1] * 81
    assert source.test.labels.tolist() == [0] * 2 + [1] * 3
    assert source.bytes == 156 * 3072
    for part, expected in ((source.test, made[:5]), (source.train, made[5:])):
        found = torch.zeros(part.count, 3, 32, 32, dtype=torch.uint8)
        pieces = sum(1 for _ in part.fill(found))
        assert pieces == -(-part.count // 64)
        assert torch.equal(found, torch.stack(expected))


def test_the_first_bad_file_is_named(tmp_path: Path) -> None:
    """Whichever thread comes upon which one first."""
    make(tmp_path, {"a": 300})
    paths = [str(path) for path in sorted((tmp_path / "a").iterdir())]
    for number in (290, 140, 70):
        Path(paths[number]).write_bytes(Path(paths[number]).read_bytes()[:200])
        with pytest.raises(DataError, match=rf"{number:03}\.png cannot be read"):
            for _ in fill(paths, torch.empty(300, 3, 32, 32, dtype=torch.uint8)):
                pass


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({}, "train cannot be read: No such file"),
        ({"train/a": 1}, "test cannot be read: No such file"),
        ({"train/a": 1, "test/b": 1}, "classes in one part only: train/a, test/b"),
        ({"train/a": 1, "train/b": 1, "test/a": 1}, "classes in one part only: train/b"),
        ({"train/a": 1, "test/a": 0}, "test/a holds no image"),
        ({"train/a": 0, "test/a": 1}, "train/a holds no image"),
        ({"train": 2, "test/a": 1}, "train holds no folder"),
    ],
)
def test_wrong_folders(tmp_path: Path, counts: dict[str, int], words: str) -> None:
    """Each is an error that names the folder."""
    make(tmp_path, counts)
    with pytest.raises(DataError, match=words):
        scan(tmp_path)


def test_the_directory_is_a_file(tmp_path: Path) -> None:
    """And so cannot be read."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Not a directory"):
        scan(tmp_path / "file")


def test_the_fingerprint(tmp_path: Path) -> None:
    """The same for a copy elsewhere; another one for other names or other bytes."""
    make(tmp_path / "one", {"train/a": 3, "test/a": 2})
    shutil.copytree(tmp_path / "one", tmp_path / "elsewhere")
    first = scan(tmp_path / "one").fingerprint()
    assert scan(tmp_path / "elsewhere").fingerprint() == first
    file = tmp_path / "elsewhere" / "train" / "a" / "001.png"
    file.write_bytes(packed(picture(seed=77), "PNG"))
    assert scan(tmp_path / "elsewhere").fingerprint() != first
    old = tmp_path / "one" / "test" / "a" / "001.png"
    old.rename(old.with_name("002.png"))
    assert scan(tmp_path / "one").fingerprint() != first
