"""Odd pictures are read rightly, broken ones become a reason, and the good ones beside them still load."""

from __future__ import annotations

import io
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from heatproof.errors import InputError
from heatproof.images import Failure, Preprocess, batches, open_source
from heatproof.images.preprocess import MAX_PIXELS, open_image, read_image

PLAIN = Preprocess((24, 32), (24, 32), (0.0,) * 3, (1.0,) * 3)


def photograph() -> Image.Image:
    """Smooth colours, so that every format keeps them nearly."""
    rows, columns = np.mgrid[0:24, 0:32]
    return Image.fromarray(np.stack([rows * 10, columns * 7, 255 - rows * 5], 2).astype(np.uint8))


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def header_only_png(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


BROKEN = {
    "empty.jpg": (b"", "the file is empty"),
    "cut.jpg": (encoded(photograph(), "JPEG")[:-40], "the file is damaged: .*truncated"),
    "text.jpg": (b"this is not a picture, whatever its name says", "its content is no picture"),
    "huge.png": (header_only_png(20_000, 20_000), "its header asks for more pixels"),
    "badchunk.png": (encoded(photograph(), "PNG")[:60] + b"\0" * 80, "the file is damaged"),
    "program.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "its content is no picture"),
    "deep.tif": (
        encoded(Image.fromarray(np.full((4, 4), 70000, np.int32)), "TIFF"),
        "its values run from 70000",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_gives_its_reason(tmp_path: Path, name: str) -> None:
    content, reason = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"^cannot read .*{name} as an image: {reason}"):
        open_image(tmp_path / name)
    with pytest.raises(InputError, match=f"^{reason}") as caught:
        read_image(io.BytesIO(content))
    assert "0x" not in str(caught.value) and "\n" not in str(caught.value)


def test_good_pictures_among_broken_ones_are_loaded(tmp_path: Path) -> None:
    for name, (content, _) in BROKEN.items():
        (tmp_path / name).write_bytes(content)
    for i in range(9):
        (tmp_path / f"good{i}.png").write_bytes(encoded(photograph(), "PNG"))
    (tmp_path / "folder.jpg").symlink_to(tmp_path / "nowhere.jpg")
    source = open_source("folder", tmp_path)
    loaded = list(batches(source, PLAIN, 4, workers=2))
    assert sum(len(batch.ids) for batch, _ in loaded) == 9
    good = PLAIN(photograph())
    for batch, _ in loaded:
        assert len(batch.images) == len(batch.ids) and all(torch.equal(image, good) for image in batch.images)
    failed = {f.id: f.reason for _, failures in loaded for f in failures}
    assert set(failed) == set(BROKEN) | {"folder.jpg"}
    assert failed["folder.jpg"] == "there is no such file"
    assert failed["empty.jpg"] == "the file is empty"
    again = [f for _, failures in batches(source, PLAIN, 4, workers=1) for f in failures]
    assert again == [Failure(name, failed[name]) for name in sorted(failed)]
    with pytest.raises(InputError, match=r"^cannot use badchunk\.png: the file is damaged"):
        list(batches(source, PLAIN, 4, fail_fast=True))


def test_a_huge_header_is_refused_before_memory_is_used() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for side in (13_378, 20_000, 60_000):
        assert side**2 > MAX_PIXELS
        with pytest.raises(InputError, match="its header asks for"):
            read_image(io.BytesIO(header_only_png(side, side)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB; one would take 500,000


def test_the_guard_stays_when_pillows_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(InputError, match="its header asks for 400,000,000 pixels, more than the 178,956,970"):
        read_image(io.BytesIO(header_only_png(20_000, 20_000)))


def test_a_sliver_that_would_explode_when_resized_is_refused() -> None:
    source = open_source("memory", [np.zeros((1, 40_000), np.uint8), np.zeros((8, 8), np.uint8)])
    ((batch, failures),) = batches(source, Preprocess(resize=256), 2)
    assert batch.ids == ("000001",)
    assert failures[0].reason.startswith("resized to 10240000x256 it would have more than")


def test_a_file_without_read_permission_gives_its_reason() -> None:
    """As root nothing is refused, so the check runs as another user."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("needs root, to become a user who may be refused")
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    try:
        folder.chmod(0o755)
        for name, mode in (("open.png", 0o644), ("closed.png", 0o000)):
            (folder / name).write_bytes(encoded(photograph(), "PNG"))
            (folder / name).chmod(mode)
        script = (
            "import os, sys\n"
            "from heatproof.images import Preprocess, batches, open_source\n"
            "from heatproof.images.preprocess import suffixes\n"
            "suffixes()\n"
            "try:\n    os.setgroups([]); os.setuid(65534)\n"
            "except OSError as error:\n    print('cannot change user:', error); sys.exit(3)\n"
            "((batch, failures),) = batches(open_source('folder', sys.argv[1]), Preprocess(), 2)\n"
            "print(batch.ids, [tuple(f) for f in failures])\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, folder], capture_output=True, text=True, timeout=120
        )
        if done.returncode == 3:
            pytest.skip(f"this machine does not let a test become another user: {done.stdout.strip()}")
        expected = "('open.png',) [('closed.png', 'there is no permission to read the file')]"
        assert done.stdout.strip() == expected, done.stderr
    finally:
        shutil.rmtree(folder)


# odd, but readable


def test_sixteen_bit_greys_keep_their_whole_range(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 24 * 32).round().astype(np.uint16).reshape(24, 32)
    for name in ("a.png", "a.tif"):
        Image.fromarray(values).save(tmp_path / name)
        read = open_image(tmp_path / name)
        assert read.mode == "L"
        assert np.array_equal(np.asarray(read), np.rint(values / 257).astype(np.uint8))
    big_endian = Image.frombytes("I;16B", (32, 24), values.astype(">u2").tobytes())
    assert np.array_equal(np.asarray(PLAIN.crop(big_endian))[..., 0], np.rint(values / 257))
    Image.fromarray((values / 65535).astype(np.float32)).save(tmp_path / "f.tif")
    assert np.abs(np.asarray(open_image(tmp_path / "f.tif")).astype(int) - values / 257).max() <= 0.51


@pytest.mark.parametrize(
    ("mode", "kind", "tolerance"),
    [
        ("CMYK", "JPEG", 12),
        ("CMYK", "TIFF", 1),
        ("P", "PNG", 40),
        ("P", "GIF", 40),
        ("RGBA", "PNG", 0),
        ("RGB", "JPEG", 12),
        ("RGB", "BMP", 0),
        ("RGB", "WEBP", 12),
        ("YCbCr", "JPEG", 12),
    ],
)
def test_colour_modes_look_like_the_original(mode: str, kind: str, tolerance: int) -> None:
    read = read_image(io.BytesIO(encoded(photograph().convert(mode), kind)))
    assert read.mode == "RGB" and read.size == (32, 24)
    difference = np.abs(np.asarray(read).astype(int) - np.asarray(photograph()))
    assert difference.mean() <= tolerance and difference.max() <= 3 * tolerance


@pytest.mark.parametrize(("mode", "kind"), [("L", "JPEG"), ("LA", "PNG"), ("1", "PNG")])
def test_greys_stay_grey_and_fill_the_models_channels(mode: str, kind: str) -> None:
    grey = photograph().convert("L")
    read = read_image(io.BytesIO(encoded(grey.convert(mode), kind)))
    assert read.mode == "L"
    if mode != "1":
        assert np.abs(np.asarray(read).astype(int) - np.asarray(grey)).max() <= 6
    image = PLAIN(read)
    assert image.shape == (3, 24, 32) and torch.equal(image[0], image[2])
    assert Preprocess((24, 32), (24, 32), (0.0,), (1.0,))(photograph()).shape == (1, 24, 32)


def test_a_palette_with_transparency_raises_no_warning() -> None:
    palette = photograph().convert("P")
    content = encoded(palette, "PNG", transparency=bytes(range(256)))
    assert np.array_equal(np.asarray(read_image(io.BytesIO(content))), np.asarray(palette.convert("RGB")))


def test_of_an_animation_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (32, 24), colour) for colour in ("red", "lime", "blue")]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(content)).n_frames == 3
    assert np.asarray(read_image(io.BytesIO(content))).reshape(-1, 3).tolist() == [[255, 0, 0]] * (24 * 32)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_pictures_are_turned_upright(orientation: int, kind: str) -> None:
    """Each file stores the same scene the way a camera held that way would."""
    scene = np.asarray(photograph())
    stored = {
        1: scene,
        2: scene[:, ::-1],
        3: scene[::-1, ::-1],
        4: scene[::-1],
        5: scene.transpose(1, 0, 2),
        6: np.rot90(scene),
        7: scene[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(scene, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(Image.fromarray(np.ascontiguousarray(stored)), kind, exif=exif)
    assert np.array_equal(np.asarray(read_image(io.BytesIO(content))), scene)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # Pillow says so; the picture is fine
def test_a_broken_exif_block_does_not_spoil_the_picture() -> None:
    good = encoded(photograph(), "JPEG")
    block = b"Exif\0\0MM\0*\0\0\0\x08\0\xff" + b"\x01\x12"
    content = good[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + good[2:]
    assert np.array_equal(
        np.asarray(read_image(io.BytesIO(content))), np.asarray(read_image(io.BytesIO(good)))
    )
