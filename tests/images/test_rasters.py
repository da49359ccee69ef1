"""Volumes, 16-bit and multi-channel pictures: read as they were measured, made ready for a network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from heatproof.errors import InputError
from heatproof.images import Preprocess, batches, open_source
from heatproof.images.files import Raster, raster
from heatproof.images.kinds import open_seen
from heatproof.images.preprocess import FILTERS, Side, fractions
from heatproof.images.source import Hashes, identify

SIZE = (6, 10, 8)
READY = Preprocess(SIZE, SIZE, (0.0,), (1.0,))


def plain(channels: int, size: tuple[int, ...], **others: object) -> Preprocess:
    return Preprocess(size, size, (0.0,) * channels, (1.0,) * channels, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(20, 31), (90, 77), (50, 120)])
def test_a_picture_is_resized_as_pillow_does_it(name: str, size: tuple[int, int]) -> None:
    grey = np.random.default_rng(0).integers(80, 176, (60, 50), dtype=np.uint8)  # a cubic overshoots
    ready = Preprocess(size, size, (0.0,), (1.0,), name)
    ours = ready(raster(grey, "hw"))
    theirs = ready(Image.fromarray(grey))
    # Pillow rounds to 8 bits after each axis; cubic weights enlarge the first rounding by up to 1.25.
    assert (ours - theirs).abs().max() <= 1.13 / 255


def test_a_crop_and_what_lies_beyond_the_picture() -> None:
    grey = np.random.default_rng(1).integers(1, 256, (40, 30), dtype=np.uint8)
    ready = Preprocess((24, 50), 32, (0.0,), (1.0,))
    ours, theirs = ready(raster(grey, "hw")), ready(Image.fromarray(grey))
    assert (ours - theirs).abs().max() <= 1.01 / 255
    assert (ours == 0).sum() == (theirs == 0).sum() > 0


def test_nearest_takes_the_pixel_that_masks_take() -> None:
    matrix = Side(7, 3, 0, 3).weights("nearest")
    assert matrix.argmax(1).tolist() == [1, 3, 5] and matrix.sum() == 3


@pytest.mark.parametrize("name", FILTERS)
def test_a_volume_that_is_constant_along_depth_becomes_its_slice(name: str) -> None:
    values = np.random.default_rng(2).random((1, 17, 23), dtype=np.float32)
    volume = np.repeat(values[:, None], 9, 1)
    flat = plain(1, (10, 8), interpolation=name)(Raster(values))
    deep = plain(1, (5, 10, 8), interpolation=name)(Raster(volume))
    torch.testing.assert_close(deep, flat[:, None].expand(-1, 5, -1, -1), rtol=0, atol=1e-6)


def test_window_and_level() -> None:
    scan = Raster(np.array([[[-1000, -160, 40, 140, 240, 3000]]], np.int16))
    assert fractions(scan, (40.0, 400.0)).tolist() == [[[0, 0, 0.5, 0.75, 1, 1]]]
    assert fractions(scan, "range")[0, 0, [0, -1]].tolist() == [0, 1]
    with pytest.raises(InputError, match=r"values run from -1000 to 3000; set preprocess.window"):
        fractions(scan, None)


@pytest.mark.parametrize(
    ("values", "bits", "white"),
    [(np.uint8(255), None, 255), (np.uint16(4095), None, 4095), (np.uint16(4095), 16, 65535), (0.5, None, 1)],
)
def test_values_by_their_bits(values: float, bits: int | None, white: float) -> None:
    result = fractions(Raster(np.full((1, 2, 2), values), bits), None)
    assert result.dtype == np.float32 and result.max() == pytest.approx(float(values) / white)


def test_boxes_and_masks_of_volumes() -> None:
    mask = np.zeros((12, 20, 16), bool)
    mask[4:8, 10:, :8] = True
    carried = READY.carry_mask(mask, (16, 20, 12))
    assert carried.shape == SIZE and carried[2:4, 5:, :4].all() and carried.sum() == 2 * 5 * 4
    with pytest.raises(InputError, match="boxes are for 2D images; mark the object of a volume by a mask"):
        READY.carry_boxes([(0, 0, 1, 1)], (16, 20, 12))
    with pytest.raises(InputError, match="it is a 2D image, but the model takes volumes"):
        READY(raster(np.zeros((4, 4)), "hw"))
    with pytest.raises(InputError, match="8-bit image"):
        plain(1, (4, 4), window=(0.0, 1.0))(Image.new("L", (4, 4)))


@pytest.mark.parametrize(("kind", "name"), [("npy", "a.npy"), ("npz", "a.npz"), ("tif", "a.tif")])
def test_many_channels_from_files(tmp_path: Path, kind: str, name: str) -> None:
    values = np.random.default_rng(3).integers(0, 65536, (9, 7, 5), dtype=np.uint16)
    for folder in ("cat", "dog"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / name
        if kind == "npy":
            np.save(path, values)
        elif kind == "npz":
            np.savez(path, picture=values)
        else:
            import tifffile

            tifffile.imwrite(path, values, photometric="minisblack", planarconfig="contig")
    source = open_source("arrays", tmp_path, bits=16)
    (loaded,) = batches(source, plain(5, (9, 7)))
    assert not loaded.failures and loaded.batch.labels is not None and loaded.batch.labels.tolist() == [0, 1]
    wanted = torch.from_numpy(values.astype(np.float32) / 65535).permute(2, 0, 1)
    torch.testing.assert_close(loaded.batch.images[0], wanted, rtol=0, atol=1e-6)


def test_sixteen_bits_stay_sixteen(tmp_path: Path) -> None:
    grey = (np.arange(256, dtype=np.uint16) * 257 + 3).reshape(16, 16).clip(max=65535)
    Image.fromarray(grey).save(tmp_path / "a.png")
    (loaded,) = batches(open_source("arrays", tmp_path, bits=16), plain(1, (16, 16)))
    assert loaded.batch.images.unique().numel() == 256
    torch.testing.assert_close(loaded.batch.images[0, 0] * 65535, torch.from_numpy(grey.astype(np.float32)))


def test_volumes_of_an_npz_file(tmp_path: Path) -> None:
    volumes = np.random.default_rng(4).integers(0, 256, (3, 12, 20, 16), dtype=np.uint8)
    np.savez(tmp_path / "set.npz", test_images=volumes, test_labels=np.array([[0], [1], [1]]))
    (loaded,) = batches(open_source("npz", tmp_path / "set.npz", axes="dhw"), READY)
    assert loaded.batch.images.shape == (3, 1, *SIZE)
    halved = torch.from_numpy(volumes[0] / np.float32(255)).unfold(0, 2, 2).unfold(1, 2, 2).unfold(2, 2, 2)
    # Pillow's filter is wider than the pixels it halves, so the mean of those is only near.
    assert (loaded.batch.images[0, 0] - halved.mean((3, 4, 5))).abs().mean() < 0.1
    with pytest.raises(InputError, match="set axes"):
        open_source("npz", tmp_path / "set.npz")


def test_nifti_is_turned_and_rescaled(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason="install heatproof[volumes]")
    values = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)
    turned = np.diag([-1.0, 1.0, 1.0, 1.0])  # x runs to the left
    image = nibabel.Nifti1Image(values, turned)
    image.header.set_slope_inter(2.0, -100.0)
    nibabel.save(image, tmp_path / "a.nii.gz")
    stored = np.asarray(nibabel.load(tmp_path / "a.nii.gz").dataobj)
    raster = open_seen(tmp_path / "a.nii.gz", volume=True)
    assert isinstance(raster, Raster)
    assert np.array_equal(raster.values[0], stored[::-1])
    (source,) = [open_source("nifti", tmp_path, order="zyx", canonical=False)]
    other = source.open(0)
    assert isinstance(other, Raster) and np.array_equal(other.values[0], stored.transpose(2, 1, 0))
    (tmp_path / "a.nii.gz").write_bytes(b"no volume")
    with pytest.raises(InputError, match=r"cannot read a.nii.gz: the file is damaged or no NIfTI"):
        source.open(0)


def test_voxels_become_as_large_as_is_asked_for_as_scipy_does_it() -> None:
    nibabel = pytest.importorskip("nibabel", reason="install heatproof[volumes]")
    from scipy.ndimage import zoom

    scan = Path(nibabel.__file__).parent / "tests" / "data" / "anatomical.nii"
    if not scan.exists():
        pytest.skip("this nibabel comes without its scan")
    raster = open_seen(scan, volume=True)
    assert isinstance(raster, Raster) and raster.spacing is not None
    own = tuple(mm * factor for mm, factor in zip(raster.spacing, (0.5, 0.8, 0.7), strict=True))
    shape = raster.values.shape[1:]
    scaled = tuple(round(n * mm / to) for n, mm, to in zip(shape, raster.spacing, own, strict=True))
    ready = plain(1, scaled, window="range", spacing=own)
    grid = {"grid_mode": True, "mode": "nearest"}
    factors = [to / n for to, n in zip(scaled, shape, strict=True)]
    wanted = zoom(fractions(raster, "range")[0], factors, order=1, **grid)
    np.testing.assert_allclose(ready(raster)[0].numpy(), wanted, rtol=0, atol=1e-5)
    bright = raster.values[0] > np.median(raster.values)
    carried = ready.fitted(raster).carry_mask(bright, raster.size)
    assert np.array_equal(carried.numpy(), zoom(bright, factors, order=0, **grid))
    smaller = plain(1, (10, 10, 10), window="range", spacing=own)(
        raster
    )  # the middle, not the whole, squeezed
    cut = [slice(round((n - 10) / 2), round((n - 10) / 2) + 10) for n in scaled]
    np.testing.assert_allclose(smaller[0].numpy(), wanted[tuple(cut)], rtol=0, atol=1e-5)


def test_a_ball_is_a_ball_whatever_the_scanner(tmp_path: Path) -> None:
    """Two scans of one ball, one of thin slices and one of thick ones whose axes lie in another order."""
    nibabel = pytest.importorskip("nibabel", reason="install heatproof[volumes]")
    thin, thick = np.array([1.0, 1.0, 1.0]), np.array([0.5, 4.0, 1.0])
    lines = ["path,mask_ball"]
    for name, lengths, axes in (("thin", thin, (0, 1, 2)), ("thick", thick, (2, 0, 1))):
        count = np.round(48 / lengths).astype(int)  # both see 48 mm
        at = [(np.arange(n) + 0.5) * mm - 24 for n, mm in zip(count, lengths, strict=True)]
        ball = sum(x**2 for x in np.meshgrid(*at, indexing="ij")) <= 12**2
        affine = np.eye(4)[:, [*axes, 3]] @ np.diag([*lengths[list(axes)], 1])
        for what in ("", "-mask"):
            image = nibabel.Nifti1Image(ball.transpose(axes).astype(np.uint8) * 200, affine)
            nibabel.save(image, tmp_path / f"{name}{what}.nii.gz")
        lines.append(f"{name}.nii.gz,{name}-mask.nii.gz")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    source = open_source("nifti", tmp_path / "list.csv")
    spacings = [source.open(i).spacing for i in range(2)]
    assert spacings == [tuple(thin), tuple(thick)]
    assert source.warning.startswith("voxels differ between volumes, from 0.5 x 4 x 1 to 1 x 1 x 1 mm")
    (loaded,) = batches(source, plain(1, (32, 32, 32), spacing=(1.0, 1.0, 1.0)))
    assert not loaded.failures and loaded.batch.truth is not None
    masks = loaded.batch.truth.masks["ball"]
    for i, far in enumerate((0, 2)):  # half a thick slice
        across = [int(masks[i].movedim(axis, 0).flatten(1).any(1).sum()) for axis in range(3)]
        assert all(abs(side - 24) <= far for side in across), across
    volumes = loaded.batch.images.sum((1, 2, 3, 4)) * 255 / 200
    assert volumes.tolist() == pytest.approx([4 / 3 * np.pi * 12**3] * 2, rel=0.02)
    (stretched,) = batches(source, plain(1, (32, 32, 32)))
    assert (stretched.batch.images[0] - stretched.batch.images[1]).abs().mean() < 0.1
    with pytest.raises(InputError, match="its voxel size is unknown"):
        plain(1, SIZE, spacing=(1.0, 1.0, 1.0))(Raster(np.zeros((1, *SIZE))))
    with pytest.raises(InputError, match="spacing is of volumes: three lengths above 0"):
        plain(1, (8, 8), spacing=(1.0, 1.0))


def write_slices(folder: Path, values: np.ndarray, order: list[int]) -> None:
    import pydicom
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    folder.mkdir(parents=True)
    series = generate_uid()
    for name, z in enumerate(order):
        meta = FileMetaDataset()
        meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = CTImageStorage, ExplicitVRLittleEndian
        meta.MediaStorageSOPInstanceUID = generate_uid()
        dataset = FileDataset(str(name), {}, file_meta=meta, preamble=b"\0" * 128)
        dataset.SOPClassUID, dataset.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
        dataset.SeriesInstanceUID, dataset.Modality = series, "CT"
        dataset.Rows, dataset.Columns = values.shape[1:]
        dataset.ImagePositionPatient, dataset.ImageOrientationPatient = [0, 0, 2.5 * z], [1, 0, 0, 0, 1, 0]
        dataset.PixelSpacing = [0.75, 0.5]  # between rows, between columns
        dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 16, 16, 15
        dataset.PixelRepresentation = 1
        dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
        dataset.RescaleSlope, dataset.RescaleIntercept = 1, -1024
        dataset.PixelData = (values[z] + 1024).astype("<i2").tobytes()
        pydicom.dcmwrite(folder / f"{name}.dcm", dataset, enforce_file_format=True)


def test_a_dicom_series_is_one_volume_in_hounsfield_units(tmp_path: Path) -> None:
    pytest.importorskip("pydicom", reason="install heatproof[dicom]")
    values = np.random.default_rng(5).integers(-1000, 2000, (4, 6, 5))
    write_slices(tmp_path / "sick" / "patient-1", values, [2, 0, 3, 1])
    write_slices(tmp_path / "well" / "patient-2", values[::-1].copy(), [0, 1, 2, 3])
    source = open_source("dicom-series", tmp_path)
    assert [s.id for s in source.samples] == ["sick/patient-1", "well/patient-2"]
    assert source.classes == ("sick", "well") and [s.label for s in source.samples] == [0, 1]
    raster = source.open(0)
    assert isinstance(raster, Raster) and np.array_equal(raster.values[0], values)
    assert (
        raster.spacing == (2.5, 0.75, 0.5)
        and source.voxels
        and source.voxels(source.samples[0]) == raster.spacing
    )
    turned = open_source("dicom-series", tmp_path, order="xyz").open(0)
    assert isinstance(turned, Raster) and turned.spacing == (0.5, 0.75, 2.5) and source.warning == ""
    assert isinstance(open_seen(tmp_path / "sick" / "patient-1", volume=True), Raster)
    before = identify(source, Hashes())
    file = tmp_path / "sick" / "patient-1" / "0.dcm"
    file.write_bytes(file.read_bytes()[:-2] + b"\1\1")
    after = identify(open_source("dicom-series", tmp_path), Hashes())
    assert before[0] != after[0] and before[1] == after[1]
    ready = plain(1, (4, 6, 5), window=(40.0, 400.0))
    (loaded,) = batches(open_source("dicom-series", tmp_path / "well"), ready)
    wanted = np.clip((values[::-1] - 40) / 400 + 0.5, 0, 1)
    torch.testing.assert_close(
        loaded.batch.images[0, 0].numpy(), wanted.astype(np.float32), rtol=0, atol=1e-6
    )


def test_slices_of_two_series_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pydicom", reason="install heatproof[dicom]")
    values = np.zeros((2, 3, 3), int)
    write_slices(tmp_path / "a", values, [0, 1])
    write_slices(tmp_path / "b", values, [0, 1])
    (tmp_path / "b" / "0.dcm").rename(tmp_path / "a" / "other.dcm")
    with pytest.raises(InputError, match="cannot read a: its slices are of 2 series; give each a folder"):
        open_source("dicom-series", tmp_path).open(0)


@pytest.mark.parametrize(
    ("axes", "expected"),
    [("hwx", "axes names h and w"), ("hhw", "axes names h and w"), ("dhw", "names 3 axes")],
)
def test_axes_that_do_not_fit(axes: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        raster(np.zeros((4, 4)), axes)
