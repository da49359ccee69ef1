"""Stored maps: small, accurate, read in any order without loading the rest."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from heatproof.errors import InputError, StoreError, UnknownNameError
from heatproof.store import Manifest, RunFolder
from heatproof.store.maps import Shard, StoredMaps, pack, slug, unpack
from heatproof.types import Maps, Unit, normalise


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.resume(tmp_path / "run", Manifest({}))


def unit(first: int, last: int, checkpoint: str = "e1") -> Unit:
    return Unit(checkpoint, (first, last), ("gradcam",), ())


def some_maps(ids: list[str], size: int = 7, method: str = "gradcam", seed: int = 0) -> Maps:
    values = torch.rand(len(ids), size, size, generator=torch.Generator().manual_seed(seed))
    return Maps(method, values, (224, 200), torch.arange(len(ids)) + 10, tuple(ids))


def there_and_back(values: Tensor) -> Tensor:
    stored, numbers = pack(values)
    assert stored.dtype == np.float16
    restored = unpack(stored, *(np.array(numbers[name], np.float32) for name in ("scale", "offset")))
    return torch.from_numpy(restored)


def worst(values: Tensor) -> float:
    """Largest error of a normalised map, whose maximum is 1."""
    exact = values.double().clamp(min=0)
    low, high = exact.amin((1, 2), keepdim=True), exact.amax((1, 2), keepdim=True)
    exact = (exact - low) / torch.where(high > low, high - low, math.inf)
    return float((normalise(there_and_back(values)).double() - exact).abs().max())


# Precision


@pytest.mark.parametrize("factor", [1e-44, 1e-30, 1e-8, 1.0, 1e6, 1e30, 3e38])
@pytest.mark.parametrize("shift", [0.0, -0.5, 0.1])
def test_any_magnitude_survives(factor: float, shift: float) -> None:
    values = (torch.rand(20, 7, 7, generator=torch.Generator().manual_seed(1)) + shift).clamp(max=1) * factor
    assert worst(values) < 1e-3
    back = there_and_back(values)
    assert torch.equal(back.sign(), values.sign())
    assert torch.allclose(back.abs().amax((1, 2)), values.abs().amax((1, 2)), rtol=2e-7, atol=0)


def test_a_small_contrast_on_a_large_constant_survives() -> None:
    contrast = torch.rand(20, 7, 7, generator=torch.Generator().manual_seed(2))
    for constant in (1.0, 30.0, 1000.0):
        assert worst(constant + contrast) < 1e-3
        assert torch.allclose(there_and_back(-constant - contrast), -constant - contrast, atol=1e-3, rtol=0)


def test_small_positives_beside_large_negatives_survive() -> None:
    values = torch.rand(20, 7, 7, generator=torch.Generator().manual_seed(3))
    values[:, 0] = -1e6
    assert worst(values) < 1e-3


def test_constant_and_zero_maps_stay_so() -> None:
    for constant in (0.0, 0.3, -2.5, 3.4e38, 1e-45):
        values = torch.full((1, 3, 3), constant)
        assert torch.equal(there_and_back(values), values)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=150, deadline=None)
@given(arrays.arrays(np.float32, (2, 3, 4), elements=finite))
def test_sign_order_and_extremes_of_any_map_are_kept(values: np.ndarray) -> None:
    given_maps = torch.from_numpy(values)
    back = there_and_back(given_maps)
    assert torch.isfinite(back).all()
    assert torch.equal(back.sign(), given_maps.sign())
    largest = given_maps.abs().amax((1, 2))
    assert torch.allclose(back.abs().amax((1, 2)), largest, rtol=2e-7, atol=0)
    assert ((back - given_maps).abs() <= 1e-3 * largest[:, None, None]).all()
    for old, new in zip(given_maps.flatten(1), back.flatten(1), strict=True):
        assert (new[old.argsort()].diff() >= 0).all()


# Reading


def test_parts_read_as_one_in_id_order(run: RunFolder) -> None:
    late, early = some_maps(["d", "b", "e"], seed=1), some_maps(["c", "a"], seed=2)
    run.write_unit(unit(2, 5), [], {"gradcam": late})
    run.write_unit(unit(0, 2), [], {"gradcam": early})
    store = run.maps()
    assert store.contents() == [("e1", "gradcam")]
    assert store.ids("e1", "gradcam") == ("a", "b", "c", "d", "e")
    maps = store.read("e1", "gradcam")
    assert (maps.method, maps.ids, maps.image_size) == ("gradcam", ("a", "b", "c", "d", "e"), (224, 200))
    assert maps.values.dtype == torch.float32
    assert maps.explained.tolist() == [11, 11, 10, 10, 12]
    expected = torch.stack([early.values[1], late.values[1], early.values[0], late.values[0], late.values[2]])
    assert torch.allclose(maps.values, expected, atol=5e-4)

    picked = store.read("e1", "gradcam", ["e", "a", "e"])
    assert picked.ids == ("e", "a", "e")
    assert torch.equal(picked.values, maps.values[[4, 0, 4]])
    assert picked.explained.tolist() == [12, 11, 12]


def test_only_the_shards_asked_for_are_opened(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in (0, 2, 4):
        maps = {m: some_maps([str(first), str(first + 1)], method=m) for m in ("gradcam", "rise")}
        run.write_unit(unit(first, first + 2), [], maps)
    opened: list[tuple[str, list[int]]] = []
    read = Shard.read

    def watched(shard: Shard, rows: list[int]) -> StoredMaps:
        opened.append((shard.method, rows))
        return read(shard, rows)

    monkeypatch.setattr(Shard, "read", watched)
    run.maps().read("e1", "rise", ["3", "4"])
    assert opened == [("rise", [1]), ("rise", [0])]
    run.maps().read("e1", "gradcam", ["0", "1"])
    assert opened[2:] == [("gradcam", [0, 1])]


def test_signed_maps_options_and_checkpoints_are_kept_apart(run: RunFolder) -> None:
    plain = some_maps(["a", "b"])
    signed = Maps(
        "smoothgrad(samples=5)", plain.values, (32, 32), torch.tensor([7, 8]), ("b", "x"), -plain.values
    )
    run.write_unit(unit(0, 2), [], {"gradcam": plain, signed.method: signed})
    run.write_unit(unit(0, 2, "e2"), [], {"gradcam": some_maps(["a", "b"], seed=5)})
    store = run.maps()
    assert store.contents() == [("e1", "gradcam"), ("e1", signed.method), ("e2", "gradcam")]
    back = store.read("e1", signed.method)
    assert (back.ids, back.explained.tolist(), back.image_size) == (("b", "x"), [7, 8], (32, 32))
    assert back.signed_values is not None
    assert torch.equal(back.signed_values, -back.values)
    assert store.read("e1", "gradcam").signed_values is None
    assert not torch.equal(store.read("e2", "gradcam").values, store.read("e1", "gradcam").values)


def test_maps_without_rows_are_not_shown_and_new_units_are(run: RunFolder) -> None:
    run.write_unit(unit(0, 1), [], {"gradcam": some_maps(["a"])})
    run.write_unit(unit(1, 2), [], {"gradcam": some_maps(["b"])})
    (run.path / "scores" / f"{unit(1, 2).hash}.parquet").unlink()  # as if killed between maps and rows
    store = run.maps()
    assert store.ids("e1", "gradcam") == ("a",)
    run.write_unit(unit(1, 2), [], {"gradcam": some_maps(["b"])})
    assert store.ids("e1", "gradcam") == ("a", "b")


def test_an_image_in_two_units_is_read_once(run: RunFolder) -> None:
    for metrics in ((), ("inside",)):
        run.write_unit(Unit("e1", (0, 2), ("gradcam",), metrics), [], {"gradcam": some_maps(["a", "b"])})
    store = run.maps()
    assert store.read("e1", "gradcam").ids == ("a", "b")


def test_different_sizes_are_not_read_together(run: RunFolder) -> None:
    run.write_unit(unit(0, 1), [], {"gradcam": some_maps(["a"], size=7)})
    run.write_unit(unit(1, 2), [], {"gradcam": some_maps(["b"], size=8)})
    with pytest.raises(InputError, match=r"differ in size \(7x7 .* 8x8 .*images of one size"):
        run.maps().read("e1", "gradcam")
    assert [run.maps().read("e1", "gradcam", [name]).values.shape[-1] for name in "ab"] == [7, 8]


def test_slugs_are_safe_and_never_shared() -> None:
    methods = ["gradcam", "gradcam++", "GradCAM", "gradcam--", "lime(samples=20)", "lime(samples=2,0)",
               "../../etc", "a/b", "😀", "🙂", "", "x" * 300, "x" * 301, "caf\udce9"]  # fmt: skip
    slugs = [slug(method) for method in methods]
    assert len({s.lower() for s in slugs}) == len(methods)
    assert all(
        s.strip(".") and len(s) < 80 and not set(s) - set("abcdefghijklmnopqrstuvwxyz0123456789_-")
        for s in slugs
    )
    assert slugs[0] == "gradcam"


# Size and refusals


def test_a_hundred_thousand_small_maps_fit_in_20_mb(run: RunFolder) -> None:
    rng = np.random.default_rng(0)
    for first in range(0, 100_000, 10_000):
        ids = tuple(f"n{k % 1000:08d}/ILSVRC2012_val_{k:08d}.JPEG" for k in range(first, first + 10_000))
        values = torch.from_numpy(rng.random((10_000, 7, 7), dtype=np.float32) * np.float32(rng.random()))
        explained = torch.from_numpy(rng.integers(0, 1000, 10_000))
        maps = Maps("gradcam", values, (224, 224), explained, ids)
        run.write_unit(unit(first, first + 10_000), [], {"gradcam": maps})
    on_disk = sum(512 * path.stat().st_blocks for path in (run.path / "maps").rglob("*") if path.is_file())
    assert 9.8e6 < on_disk < 20e6
    maps = run.maps().read("e1", "gradcam")
    assert len(maps) == 100_000 and list(maps.ids) == sorted(maps.ids)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_maps_with_nan_are_refused_by_name_before_anything_is_written(run: RunFolder, bad: float) -> None:
    maps = some_maps(["a", "b"])
    maps.values[1, 2, 3] = bad
    with pytest.raises(InputError, match="the map of gradcam for 'b' has NaN or infinite values"):
        run.write_unit(unit(0, 2), [], {"gradcam": maps})
    assert run.done() == set()
    assert not (run.path / "maps").exists()


def test_maps_that_do_not_fit_together_are_refused(run: RunFolder) -> None:
    nameless = Maps("gradcam", torch.rand(2, 3, 3), (9, 9), torch.zeros(2, dtype=torch.long))
    flat = Maps("gradcam", torch.rand(2, 9), (9, 9), torch.zeros(2, dtype=torch.long), ("a", "b"))
    shapes = r"must be 'b h w' or 'b d h w'; got shape \(2, 9\)"
    for maps, message in ((nameless, "2 maps but 0 ids"), (flat, shapes)):
        with pytest.raises(InputError, match=message):
            run.write_unit(unit(0, 2), [], {"gradcam": maps})


def test_empty_maps_are_no_maps(run: RunFolder) -> None:
    run.write_unit(unit(0, 0), [], {"gradcam": some_maps([])})
    assert run.maps().contents() == []


def test_what_is_not_there_raises_a_clear_error(run: RunFolder) -> None:
    run.write_unit(unit(0, 2), [], {"gradcam": some_maps(["a", "b"])})
    with pytest.raises(
        UnknownNameError, match="unknown method with stored maps at e1 'gradcan'; did you mean 'gradcam'"
    ):
        run.maps().read("e1", "gradcan")
    with pytest.raises(UnknownNameError, match="unknown checkpoint with stored maps 'e7'; "):
        run.maps().read("e7", "gradcam")
    with pytest.raises(InputError, match="no map of gradcam at e1 for 1 of 2 images, such as 'z'"):
        run.maps().read("e1", "gradcam", ["a", "z"])
    with pytest.raises(InputError, match="no images were named"):
        run.maps().read("e1", "gradcam", [])


def test_broken_files_are_named(run: RunFolder) -> None:
    run.write_unit(unit(0, 2), [], {"gradcam": some_maps(["a", "b"])})
    shard = run.path / "maps" / "gradcam" / f"{unit(0, 2).hash}.npy"
    shard.write_bytes(shard.read_bytes()[:150])
    with pytest.raises(StoreError, match=rf"cannot read .*{shard.name}.*heatproof verify"):
        run.maps().read("e1", "gradcam")
    index = run.path / "maps" / f"{unit(0, 2).hash}.json.gz"
    index.write_bytes(b"no")
    with pytest.raises(StoreError, match=f"cannot read .*{index.name}"):
        run.maps().read("e1", "gradcam")


def test_names_that_are_not_unicode_are_found_again(run: RunFolder) -> None:
    run.write_unit(unit(0, 1), [], {"gradcam": some_maps(["caf\udce9"])})
    assert run.maps().read("e1", "gradcam", ["caf\udce9"]).ids == ("caf\\udce9",)
