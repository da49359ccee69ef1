"""DICOM files, shown as a radiologist's screen would show them.

The stored values go through the file's rescale slope and intercept (or modality table), then through a window
of centre c and width w to a grey in [0, 1]:

    LINEAR         (x - (c - 1/2)) / (w - 1) + 1/2        (the standard's default)
    LINEAR_EXACT   (x - c) / w + 1/2
    SIGMOID        1 / (1 + exp(-4 (x - c) / w))

clipped, and turned round for MONOCHROME1, where large values are dark. The window is the one given, else the
file's first, else the file's VOI table, else the picture's own range. Of several frames the first counts.
Formulas: DICOM PS3.3, C.11.2.1.2 and C.11.2.1.3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from heatproof.errors import InputError, need
from heatproof.images.files import MAX_PIXELS, check_file, named_file, picture_reader

SUFFIXES = (".dcm", ".dicom", ".ima")
MARK = b"DICM"
PREAMBLE = 128


def is_dicom_name(file: Path) -> bool:
    return file.suffix.lower() in ("", *SUFFIXES) and file.name != "DICOMDIR"


def is_dicom_file(path: Path) -> bool:
    """Whether the content says so; False too where reading it will tell what is wrong."""
    try:
        check_file(path)
        with path.open("rb") as file:
            return file.read(PREAMBLE + len(MARK))[PREAMBLE:] == MARK
    except (OSError, InputError):
        return False


def read_dicom(path: Path, window: tuple[float, float] | None = None) -> Image.Image:
    """The first frame in 8 bits, "L" or "RGB"; the error gives the reason without the file's name."""
    pydicom = need("pydicom", "dicom")
    pixels = need("pydicom.pixels", "dicom")
    try:
        check_file(path)
        file = pydicom.dcmread(path)
        if int(file.Rows) * int(file.Columns) > MAX_PIXELS:
            raise InputError(f"it has more than the {MAX_PIXELS:,} pixels that are safe to decode")
        values = pixels.pixel_array(file, index=0)
        kind = str(file.PhotometricInterpretation)
        if values.ndim == 3 and values.shape[2] == 3 and values.dtype == np.uint8:
            return Image.fromarray(values)
        if not kind.startswith("MONOCHROME"):
            raise InputError(f"its pixels are {kind}, which is not supported; convert them to RGB or grey")
        grey = _windowed(pixels, file, values, window)
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError("there is no such file") from None
    except PermissionError:
        raise InputError("there is no permission to read the file") from None
    except pydicom.errors.InvalidDicomError:
        raise InputError("its content is not DICOM") from None
    except Exception as error:  # broken headers and missing decoders fail in their own ways
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"the DICOM file cannot be decoded: {reason}") from error
    return Image.fromarray(np.rint((1 - grey if kind == "MONOCHROME1" else grey) * 255).astype(np.uint8))


def _windowed(pixels: Any, file: Any, values: np.ndarray, window: tuple[float, float] | None) -> np.ndarray:
    """Greys in [0, 1]."""
    own = file.get("WindowWidth") is not None
    if window is None and not own and "VOILUTSequence" in file:
        table = file.VOILUTSequence[0]
        greys = pixels.apply_voi(pixels.apply_modality_lut(values, file), file)
        return np.asarray(greys / (2 ** table.LUTDescriptor[2] - 1))
    x = np.asarray(pixels.apply_modality_lut(values, file), dtype=np.float64)
    shape = str(file.get("VOILUTFunction", "LINEAR") if window is None else "LINEAR")
    if window is None and own:
        window = _first(file.WindowCenter), _first(file.WindowWidth)
    if window is None:
        low, high = x.min(), x.max()
        return (x - low) / (high - low) if high > low else np.zeros_like(x)
    centre, width = window
    if shape == "SIGMOID":
        return 1 / (1 + np.exp(np.clip(-4 * (x - centre) / width, -700, 700)))
    if shape == "LINEAR_EXACT":
        return np.clip((x - centre) / width + 0.5, 0, 1)
    if width <= 1:  # the standard's formula becomes a step here
        return (x > centre - 0.5).astype(np.float64)
    return np.clip((x - (centre - 0.5)) / (width - 1) + 0.5, 0, 1)


def _first(value: Any) -> float:
    """A window may have several values; the first is the one to show first."""
    return float(value[0] if hasattr(value, "__len__") and not isinstance(value, str) else value)


def open_image(path: str | Path, bits: int | None = None) -> Image.Image:
    """Read a picture or DICOM file completely, or say in one sentence why that is not possible.

    Args:
        path: a file, or a photograph that comes with heatproof: example:cat, astronaut, coffee or rocket.
        bits: the depth of 16-bit greys, where it is known (see files.py).
    """
    file = named_file(path)
    try:
        return read_dicom(file) if is_dicom_file(file) else picture_reader(bits)(file)
    except InputError as error:
        if isinstance(error.__context__, FileNotFoundError):
            raise InputError(f"no such image: {path}") from None
        raise InputError(f"cannot read {path} as an image: {error}") from error
