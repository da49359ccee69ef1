"""Programs that others wrote read the codes: OpenCV's and zxing's readers find the text that was drawn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from heatproof.images.codes import QRSet, make_qr
from heatproof.images.distort import distort
from heatproof.images.symbols import SYMBOLS, Code

pytest.importorskip("segno")


@pytest.fixture(scope="module")
def codes() -> QRSet:
    return make_qr(100, 0, 224, seed=1)


@pytest.fixture(scope="module")
def opencv() -> Callable[[np.ndarray], str]:
    detector = pytest.importorskip("cv2").QRCodeDetector()
    return lambda picture: detector.detectAndDecode(np.ascontiguousarray(picture[..., ::-1]))[0]


def read_by_zxing(picture: np.ndarray) -> list[str]:
    zxing = pytest.importorskip("zxingcpp")
    return [barcode.text for barcode in zxing.read_barcodes(np.ascontiguousarray(picture))]


def share_read(read: Callable[[np.ndarray], str], pictures: np.ndarray, codes: QRSet) -> float:
    return float(np.mean([read(p) == s.code.text for p, s in zip(pictures, codes.spots, strict=True)]))


def test_opencv_reads_95_percent_and_zxing_all(codes: QRSet, opencv: Callable[[np.ndarray], str]) -> None:
    """What OpenCV misses has modules of two or three pixels; zxing reads those as well."""
    assert share_read(opencv, codes.pictures, codes) >= 0.95
    assert all(s.code.text in read_by_zxing(p) for p, s in zip(codes.pictures, codes.spots, strict=True))


@pytest.mark.parametrize("kind", ["rotation", "perspective", "blur", "jpeg", "low_light", "occlusion"])
def test_fewer_are_read_as_severity_grows(
    codes: QRSet, opencv: Callable[[np.ndarray], str], kind: str
) -> None:
    some = codes.take(slice(30))
    none, half, full = (
        share_read(opencv, distort(some.pictures, kind, severity)[0], some) for severity in (0, 0.5, 1)
    )
    assert none >= half >= full and none > full


def page(code: Code, scale: int = 4, quiet: int = 10) -> np.ndarray:
    grey = np.where(np.pad(code.modules, quiet), 0, 255).astype(np.uint8)
    return grey.repeat(scale, 0).repeat(scale, 1)


@pytest.mark.parametrize("symbol", sorted(SYMBOLS))
def test_zxing_reads_every_version_of_every_symbol(symbol: str) -> None:
    kind = SYMBOLS[symbol]
    for version in list(kind.versions)[:14]:
        code = kind.random(np.random.default_rng(version), version)
        assert read_by_zxing(page(code)) == [code.text], f"{symbol} of version {version}"


@pytest.mark.parametrize("symbol", sorted(set(SYMBOLS) - {"qr"}))
def test_zxing_reads_the_pictures_of_other_symbols(symbol: str) -> None:
    made = make_qr(40, 0, 224, seed=0, symbol=symbol)
    read = [s.code.text in read_by_zxing(p) for p, s in zip(made.pictures, made.spots, strict=True)]
    assert np.mean(read) >= 0.95
