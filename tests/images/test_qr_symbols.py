"""Other symbols go through the same machinery, with their own parts."""

from __future__ import annotations

import numpy as np
import pytest

from heatproof.errors import HeatproofError, InputError
from heatproof.images import symbols as printed
from heatproof.images.codes import NEGATIVES, make_qr, negatives_of
from heatproof.images.distort import distort
from heatproof.images.symbols import PARTS, SYMBOLS, Symbol, register

pytest.importorskip("segno")
pytest.importorskip("zxingcpp")


@pytest.mark.parametrize("name", sorted(SYMBOLS))
def test_every_symbol_keeps_its_promises(name: str) -> None:
    symbol = SYMBOLS[name]
    for version in symbol.usual:
        code = symbol.random(np.random.default_rng(version), version)
        assert code.modules.shape == symbol.shape(version) and code.modules.dtype == bool
        finder, timing, box = (code.parts[part] for part in PARTS)
        assert finder.any() and timing.any() and box.all() and not (finder & timing).any()
        again = symbol.random(np.random.default_rng(version), version)
        assert code.text == again.text and np.array_equal(code.modules, again.modules)


@pytest.mark.parametrize("name", sorted(SYMBOLS))
def test_every_symbol_makes_pictures_masks_and_negatives(name: str) -> None:
    made = make_qr(4, 12, 160, seed=3, symbol=name)
    assert made.kinds[:4].tolist() == [name] * 4 and set(made.kinds[4:]) == set(negatives_of(SYMBOLS[name]))
    for i, spot in enumerate(made.spots[:4]):
        for part, modules in spot.code.parts.items():
            assert made.masks[part][i].sum() == modules.sum() * spot.scale**2
        inside = made.pictures[i][spot.rows, spot.columns].sum(-1) < 3 * 127
        assert np.array_equal(inside[:: spot.scale, :: spot.scale], spot.code.modules)
    assert np.array_equal(make_qr(5, 1, 160, seed=3, symbol=name).pictures[:4], made.pictures[:4])
    _, masks = distort(made.pictures, "perspective", 1.0, masks=made.masks)
    assert masks is not None and all(masks[part][:4].any((1, 2)).all() for part in PARTS)


def test_a_data_matrix_has_an_l_and_alternating_borders() -> None:
    for version in (1, 6, 9, 12):
        code = printed.DATA_MATRIX.random(np.random.default_rng(version), version)
        n, dark = len(code.modules), code.modules
        assert dark[:, 0].all() and dark[-1].all()
        assert dark[0, ::2].all() and not dark[0, 1::2].any()
        assert dark[1::2, -1].all() and not dark[0:-1:2, -1].any()
        assert dark[code.parts["finder"]].all()
        if n <= 26:
            assert code.parts["finder"].sum() == 2 * n - 1 and code.parts["timing"].sum() == 2 * n - 3


def test_an_aztec_code_has_a_bullseye_and_an_alternating_grid() -> None:
    for layers in (1, 4, 8):
        code = printed.AZTEC.random(np.random.default_rng(layers), layers)
        rows, columns = np.indices(code.modules.shape) - len(code.modules) // 2
        ring = np.maximum(abs(rows), abs(columns))
        inside = ring <= 6
        assert np.array_equal(code.modules[inside], ring[inside] % 2 == 0)
        across = (rows == 0) & (ring > 7)
        assert np.array_equal(code.modules[across], columns[across] % 2 == 0)
        assert code.parts["timing"][across].all() and code.parts["finder"].sum() == 169


def test_a_barcode_lies_between_its_guards() -> None:
    modules = printed.BARCODE.encode("A1", 2)
    widths = np.diff(np.flatnonzero(np.diff(np.r_[0, modules[0].astype(int), 0])))
    assert widths[:6].tolist() == [2, 1, 1, 2, 1, 4] and widths[-7:].tolist() == [2, 3, 3, 1, 1, 1, 2]
    assert (modules == modules[0]).all()


def test_negatives_of_a_linear_code_are_linear() -> None:
    for kind in ("finderless", "shuffled"):
        modules = NEGATIVES[kind](np.random.default_rng(0), SYMBOLS["barcode"], 3)
        assert (modules == modules[0]).all() and modules.shape == SYMBOLS["barcode"].shape(3)


def test_what_cannot_be_encoded_raises_a_clear_error() -> None:
    for wrong, message in (
        (
            lambda: printed.DATA_MATRIX.encode("ABCD", 1),
            "4 characters do not fit into version 1 of the Data Matrix",
        ),
        (lambda: printed.DATA_MATRIX.encode("é", 1), "ASCII"),
        (lambda: printed.DATA_MATRIX.encode("A", 15), "there is no version 15 of the Data Matrix"),
        (lambda: printed.BARCODE.encode("ABCD", 3), "needs a barcode of version 4, not 3"),
        (lambda: printed.BARCODE.encode("AB", 3), "needs a barcode of version 2, not 3"),
        (lambda: printed.BARCODE.encode("é", 1), "printable ASCII"),
        (
            lambda: printed.AZTEC.encode("A" * 40, 1),
            "40 characters do not fit into version 1 of the Aztec code",
        ),
        (lambda: printed.AZTEC.encode("", 1), "printable ASCII"),
        (lambda: make_qr(1, 1, 40, symbol="barcode"), "does not fit into 40x40 pixels"),
        (lambda: make_qr(1, 1, symbol="qrr"), "unknown symbol 'qrr'; did you mean 'qr'"),
    ):
        with pytest.raises(HeatproofError, match=message):
            wrong()


def test_a_name_is_registered_once() -> None:
    with pytest.raises(InputError, match="registered twice"):
        register(Symbol(**{**vars(SYMBOLS["qr"]), "title": "another"}))
    assert SYMBOLS["qr"].title == "QR code"
