"""Odd pictures are read rightly, broken ones become a reason, and the good ones beside them still load."""

from __future__ import annotations

import io
import logging
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from heatproof.errors import InputError
from heatproof.images import Failure, Preprocess, batches, open_source
from heatproof.images.files import MAX_PIXELS, open_image, read_image
from heatproof.images.source import Hashes, identify

PLAIN = Preprocess((24, 32), (24, 32), (0.0,) * 3, (1.0,) * 3)


def photograph() -> Image.Image:
    """Smooth colours, so that every format keeps them nearly."""
    rows, columns = np.mgrid[0:24, 0:32]
    return Image.fromarray(np.stack([rows * 10, columns * 7, 255 - rows * 5], 2).astype(np.uint8))


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, bits: int, data: bytes) -> bytes:
    """A colour PNG, which Pillow does not write with 16 bits."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content


def header_only_png(width: int, height: int) -> bytes:
    return png(width, height, 8, bytes(1000))


BROKEN = {
    "empty.jpg": (b"", "the file is empty"),
    "cut.jpg": (encoded(photograph(), "JPEG")[:-40], "the file is damaged: .*truncated"),
    "text.jpg": (b"this is not a picture, whatever its name says", "its content is not a readable image"),
    "huge.png": (header_only_png(20_000, 20_000), "its header declares more pixels"),
    "badchunk.png": (encoded(photograph(), "PNG")[:60] + b"\0" * 80, "the file is damaged"),
    "program.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "its content is not a"),
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
    assert again == [Failure(name, failed[name], name == "folder.jpg") for name in sorted(failed)]
    with pytest.raises(InputError, match=r"^cannot use badchunk\.png: the file is damaged"):
        list(batches(source, PLAIN, 4, fail_fast=True))


def test_a_huge_header_is_refused_before_memory_is_used() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for side in (13_378, 20_000, 60_000):
        assert side**2 > MAX_PIXELS
        with pytest.raises(InputError, match="its header declares"):
            read_image(io.BytesIO(header_only_png(side, side)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB; one would take 500,000


def test_the_guard_stays_when_pillows_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(InputError, match="its header declares 400,000,000 pixels, more than the 178,956,970"):
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
            "import os, sys, torch\n"
            "from heatproof.images import Preprocess, batches, open_source\n"
            "from heatproof.images.files import suffixes\n"
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
        expected = "('open.png',) [('closed.png', 'there is no permission to read the file', False)]"
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


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What a user is told, as if nobody had been told before."""
    from heatproof.images import files

    files._log_depth.cache_clear()
    caplog.set_level(logging.WARNING, "heatproof.images")
    return caplog


@pytest.mark.parametrize("bits", [8, 10, 12, 14])
@pytest.mark.parametrize("kind", ["png", "tif"])
def test_shallow_data_in_sixteen_bit_files_is_not_black(
    tmp_path: Path, logged: pytest.LogCaptureFixture, bits: int, kind: str
) -> None:
    top = 2**bits - 1
    bright = np.linspace(0, top, 24 * 32).round().astype(np.uint16).reshape(24, 32)
    dim = (bright * 0.6).astype(np.uint16)  # still above the next lower depth, so the scale is the same
    for i, values in enumerate((bright, dim, bright)):
        Image.fromarray(values).save(tmp_path / f"{i}.{kind}")
        assert np.array_equal(
            np.asarray(open_image(tmp_path / f"{i}.{kind}")), np.rint(values * (255 / top)).astype(np.uint8)
        )
    assert len(list(batches(open_source("folder", tmp_path), PLAIN, 1))) == 3
    (record,) = logged.records  # one sentence, however many pictures
    assert f"fit into {bits} bits are read as such ({top} is white); set bits" in record.getMessage()


def test_full_and_empty_sixteen_bit_pictures_are_not_remarked_on(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    for name, values in (("full", [[0, 20_000]]), ("black", [[0, 0]])):
        Image.fromarray(np.array(values, np.uint16)).save(tmp_path / f"{name}.png")
        read = np.asarray(open_image(tmp_path / f"{name}.png"))
        assert np.array_equal(read, np.rint(np.array(values) / 257))
    assert not logged.records


def test_a_stated_bit_depth_wins(tmp_path: Path, logged: pytest.LogCaptureFixture) -> None:
    (tmp_path / "scans").mkdir()
    path = tmp_path / "scans" / "a.png"
    Image.fromarray(np.array([[0, 900]], np.uint16)).save(path)
    assert np.asarray(open_image(path, bits=12)).tolist() == [[0, 56]]
    assert np.asarray(open_image(path, bits=16)).tolist() == [[0, 4]]
    assert np.asarray(open_source("folder", tmp_path / "scans", bits=12).open(0)).tolist() == [[0, 56]]
    assert not logged.records
    with pytest.raises(InputError, match="its values run from 0 to 900; 8 bits hold 0 to 255"):
        open_image(path, bits=8)
    (tmp_path / "list.csv").write_text("path\nscans/a.png\n")
    for kind, where in (("folder", tmp_path / "scans"), ("csv", tmp_path / "list.csv")):
        with pytest.raises(
            InputError, match=r"^bits is how many bits a 16-bit grey really has, 8 to 16; got 32"
        ):
            open_source(kind, where, bits=32)


def test_sixteen_bit_colours_that_would_turn_black_are_refused() -> None:
    values = np.random.default_rng(0).integers(0, 4096, (6, 7, 3))
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    with pytest.raises(
        InputError, match=r"^its 16-bit colours reach only 15 of 255 in 8 bits.*set bits to 16"
    ):
        read_image(io.BytesIO(png(7, 6, 16, rows)))
    assert np.array_equal(np.asarray(read_image(io.BytesIO(png(7, 6, 16, rows)), bits=16)), values >> 8)
    deep = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values * 16)
    assert np.array_equal(np.asarray(read_image(io.BytesIO(png(7, 6, 16, deep)))), values >> 4)


def test_floats_that_are_no_fractions_are_refused() -> None:
    content = encoded(Image.fromarray(np.array([[0, 4095]], np.float32)), "TIFF")
    with pytest.raises(InputError, match=r"^its values run from 0 to 4095; 8 or 16 bits, or fractions of 1"):
        read_image(io.BytesIO(content))


# no files at all


def within(seconds: float, call: Callable[[], object]) -> str:
    """The error a call ends with; a call that waits for ever fails the test and not the machine."""
    messages: list[str] = []

    def run() -> None:
        try:
            call()
        except InputError as error:
            messages.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for ever"
    return messages[0] if messages else ""


@pytest.mark.skipif(os.name != "posix", reason="pipes, sockets and devices in folders are a Unix matter")
def test_pipes_sockets_devices_and_folders_are_no_pictures() -> None:
    with tempfile.TemporaryDirectory() as short:  # the path of a socket has at most 107 bytes
        place = Path(short)
        os.mkfifo(place / "pipe.png")
        (place / "folder.png").mkdir()
        (place / "null.png").symlink_to("/dev/null")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(place / "socket.png"))
            for name, kind in (
                ("pipe", "a pipe"), ("folder", "a folder"), ("null", "a device"), ("socket", "a socket"),
            ):  # fmt: skip
                message = within(20, lambda name=name: open_image(place / f"{name}.png"))  # type: ignore[misc]
                path = place / f"{name}.png"
                assert (
                    message == f"cannot read {path} as an image: it is {kind}, not a file; name an image file"
                )
        (place / "list.csv").write_text("path,x0,y0,x1,y1\npipe.png,0,0,4,4\n")
        listed_message = within(
            20, lambda: open_source("csv", place / "list.csv", box_share=(0.1, 0.9)).open(0)
        )
        assert listed_message == "cannot read pipe.png: it is a pipe, not a file; name an image file"
        assert "it is a pipe" in within(20, lambda: open_source("npz", place / "pipe.png"))


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices in folders are a Unix matter")
def test_pipes_and_devices_are_not_read_to_know_them_by_content(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    (tmp_path / "cat" / "zero.png").symlink_to("/dev/zero")
    known: list[tuple[str, str]] = []
    within(20, lambda: known.extend(identify(open_source("folder", tmp_path), Hashes())))
    assert [name for name, _ in known] == ["cat/pipe.png", "cat/zero.png"]


def test_a_nul_in_a_path_raises_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its path holds a NUL character, which no file name can"):
        open_image(tmp_path / "a\0b.png")
    for kind in ("folder", "csv", "npz", "imagenet"):
        with pytest.raises(InputError, match=r"the path '.*a\\x00b' holds a NUL character"):
            open_source(kind, tmp_path / "a\0b")
    (tmp_path / "list.csv").write_bytes(b"path\na\0b.png\n")
    source = open_source("csv", tmp_path / "list.csv")
    assert source.hash
    ((_, (failure,)),) = batches(source, PLAIN)
    assert failure.reason == "its path holds a NUL character, which no file name can; correct the path"


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
    assert getattr(Image.open(io.BytesIO(content)), "n_frames", 1) == 3
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
