"""COSE end to end: does it tell good methods from bad ones, and does a study survive its accidents?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import counting
from heatproof.cli.study import cose_command
from heatproof.errors import HeatproofError
from heatproof.explain.api import explain
from heatproof.images import Preprocess
from heatproof.images.transforms import draw
from heatproof.metrics.agreement import ssim
from heatproof.metrics.stability import checkpoint_pairs, comparable, cose_map
from heatproof.models import Model, load_model
from heatproof.registry import Explainer, explainers
from heatproof.store import RunFolder
from heatproof.studies.cose.protocol import CoseResult, cose_study, input_pairs
from heatproof.studies.cose.results import TABLES
from heatproof.studies.settings import COSE_METHODS, CoseSettings
from heatproof.types import Maps, Signed, Trace
from tiny_study import make_study

calls = 0


def local_rule(trace: Trace) -> Tensor:
    """Equivariant by construction: soft spots where the picture is lighter than half its range."""
    grey = trace.model.preprocess.restore(trace.images).mean(1, keepdim=True)
    low, high = grey.amin((2, 3), keepdim=True), grey.amax((2, 3), keepdim=True)
    light = (grey > (low + high) / 2).float()
    return F.avg_pool2d(F.avg_pool2d(light, 9, 1, 4), 9, 1, 4)[:, 0]


def fresh_noise(trace: Trace) -> Tensor:
    global calls
    calls += 1
    generator = torch.Generator().manual_seed(calls)
    return torch.rand(len(trace.images), *trace.image_size, generator=generator)


def blind(trace: Trace) -> Tensor:
    """Takes no notice of the input."""
    row = torch.linspace(0, 1, trace.image_size[1])
    return row.expand(len(trace.images), *trace.image_size)


@pytest.fixture
def methods() -> Iterator[None]:
    """Three methods with known answers, gone after the test."""
    before = dict(explainers._entries), dict(explainers._keys)
    explainers.names()
    for function in (local_rule, fresh_noise, blind):
        explainers.add(Explainer(function.__name__, function))
    yield
    for name in ("local_rule", "fresh_noise", "blind"):
        del explainers._entries[name]
    explainers._keys.update(before[1])
    for key in ("localrule", "freshnoise", "blind"):
        explainers._keys.pop(key)


class Fixed(nn.Module):
    """Predicts class 0 for light pictures, 1 for dark ones, or always the same class."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor(level))

    def forward(self, images: Tensor) -> Tensor:
        light = images.mean((1, 2, 3)) - self.level
        return torch.stack([light, -light], 1)


SIZE = 72


def discs(n: int = 3) -> Tensor:
    """Light discs on black, uint8: what the rule sees survives every transform."""
    y, x = np.mgrid[:SIZE, :SIZE]
    made = []
    for i in range(n):
        far = np.hypot(x - 30 - 4 * i, y - 36 + 3 * i)
        made.append(np.where(far < 12 + i, 250, 0))
    return torch.from_numpy(np.stack(made).astype(np.uint8))[:, None].expand(-1, 3, -1, -1).contiguous()


def fixed_model(level: float) -> Model:
    plain = Preprocess(size=(SIZE, SIZE), resize=SIZE, mean=(0.0,) * 3, std=(1.0,) * 3)
    return Model(Fixed(level), preprocess=plain)


def compared(method: str, level: float, names: list[str] | None = None, **options: Any) -> tuple[Any, Any]:
    """SSIM of every pair, and whether the prediction stayed."""
    model, pictures = fixed_model(level), discs()
    ids = [f"disc{i}" for i in range(len(pictures))]
    reference = explain(model, model.preprocess.from_bytes(pictures), [method], ids=ids)
    pairs = input_pairs(model, pictures, reference, draw(0, ids, names=names), **options)
    return pairs.ssim[method], pairs.predicted == reference[method].explained.numpy()[:, None]


def test_an_equivariant_method_is_consistent(methods: None) -> None:
    values, same = compared("local_rule", -1.0)
    assert same.all() and values.shape == (3, 48)
    assert values.mean() > 0.98


def test_without_the_inverse_it_would_not_be(methods: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from heatproof.images.transforms import Transform

    monkeypatch.setattr(Transform, "inverse_maps", lambda self, maps, magnitudes: maps)
    values, _ = compared("local_rule", -1.0, ["translate-x", "rotate", "flip-x"])
    assert values.mean() < 0.95


def test_fresh_noise_is_not_consistent(methods: None) -> None:
    values, same = compared("fresh_noise", -1.0)
    assert same.all() and values.shape == (3, 48)
    assert abs(values.mean()) < 0.1


def test_a_blind_method_is_not_sensitive(methods: None) -> None:
    names = ["brightness", "contrast", "colour", "sharpness", "blur", "smooth", "equalize", "autocontrast"]
    level = float(discs().float().mean() / 255)  # brighter pictures are class 0, darker ones class 1
    values, same = compared("blind", level, names)
    assert 0.1 < same.mean() < 0.9
    assert (1 - values[~same]).mean() == pytest.approx(0, abs=1e-6)


def test_random_floor_gets_nothing_for_repeating_its_numbers() -> None:
    values, _ = compared("random", -1.0, ["flip-x", "autocontrast", "colour"])
    assert abs(values.mean()) < 0.1


def test_both_sides_of_a_pair_draw_their_own_numbers_unless_told(cnn: nn.Module) -> None:
    model = Model(cnn, preprocess=Preprocess(size=(32, 32), resize=32))
    grey = torch.randint(0, 256, (1, 1, 32, 32), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    pictures = grey.expand(-1, 3, -1, -1)  # without colour, so that changing it changes nothing
    method = "smoothgrad(samples=2)"
    reference = explain(model, model.preprocess.from_bytes(pictures), [method])
    drawn = draw(0, ["a"], names=["colour"])
    own = input_pairs(model, pictures, reference, drawn).ssim[method]
    repeated = input_pairs(model, pictures, reference, drawn, same_seed=True).ssim[method]
    assert own.max() < 0.9 and repeated == pytest.approx(1, abs=1e-4)


def test_pairs_equal_the_slow_way(methods: None) -> None:
    """One picture, one variant, one SSIM at a time, from the public parts."""
    model, pictures = fixed_model(-1.0), discs(2)
    reference = explain(model, model.preprocess.from_bytes(pictures), ["edges"], ids=["a", "b"])
    drawn = draw(5, ["a", "b"], 2, ["rotate", "translate-y", "brightness", "blur"])
    pairs = input_pairs(model, pictures, reference, drawn, batch_size=3)
    for i in range(2):
        for run_ in drawn.runs():
            for v in range(run_.first, run_.end):
                magnitude = torch.tensor([drawn.magnitudes[i, v]])
                variant = run_.transform.apply(pictures[i : i + 1], magnitude)
                heat = explain(model, variant.float() / 255, ["edges"])["edges"].upsample()
                back = run_.transform.inverse_maps(heat, magnitude)
                valid = run_.transform.valid((SIZE, SIZE), magnitude)
                wanted = ssim(reference["edges"].upsample()[i : i + 1], back, mask=valid)
                assert pairs.ssim["edges"][i, v] == pytest.approx(float(wanted), abs=1e-5)


def test_one_pass_serves_all_cams_and_batches_change_nothing(cnn: nn.Module) -> None:
    model = Model(cnn, preprocess=Preprocess(size=(32, 32), resize=32))
    pictures = torch.randint(0, 256, (3, 3, 32, 32), generator=torch.Generator().manual_seed(1)).to(
        torch.uint8
    )
    cams = ["gradcam", "gradcam++", "layercam", "xgradcam", "hirescam", "eigencam"]
    reference = explain(model, model.preprocess.from_bytes(pictures), cams)
    drawn = draw(0, ["a", "b", "c"])
    results = []
    for batch_size, passes_wanted in ((36, 4), (7, 21)):
        with counting(cnn) as passes:
            results.append(input_pairs(model, pictures, reference, drawn, batch_size=batch_size))
        assert passes.forward == passes_wanted and passes.backward == passes_wanted
        assert sum(passes.batches) == 48 * 3
    for cam in cams:
        assert np.allclose(results[0].ssim[cam], results[1].ssim[cam], atol=1e-4, equal_nan=True)
    assert np.array_equal(results[0].predicted, results[1].predicted)


def test_maps_as_cose_compares_them() -> None:
    gradients = torch.randn(2, 3, 8, 8)
    values, signed = gradients.abs().sum(1), gradients.sum(1)
    attribution = Maps("gradient", values, (8, 8), torch.zeros(2), signed_values=signed)
    assert torch.equal(comparable(attribution), cose_map(gradients))
    cam = Maps("gradcam", values, (8, 8), torch.zeros(2))
    assert torch.equal(comparable(cam), cam.upsample())
    assert isinstance(Signed(values, signed), tuple)


def test_checkpoint_pairs() -> None:
    def maps(seed: int, ids: tuple[str, ...] = ("a", "b", "c")) -> Maps:
        values = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(seed))
        values[2] = 0
        return Maps("m", values, (18, 18), torch.tensor([0, 1, 0]), ids)

    earlier, end = replace(maps(1), explained=torch.tensor([0, 0, 0])), maps(2)
    pairs = checkpoint_pairs(earlier, end)
    assert pairs.same.tolist() == [True, False, True]
    assert torch.equal(pairs.ssim[:2], ssim(end.upsample(), earlier.upsample())[:2])
    assert checkpoint_pairs(maps(2), end).ssim[:2].tolist() == [1, 1]
    assert math.isnan(pairs.ssim[2]) and "constant" in pairs.reasons()[2]
    with pytest.raises(HeatproofError, match="same images"):
        checkpoint_pairs(maps(1, ("b", "a", "c")), end)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CoseSettings:
    """Six noise pictures of two classes, a tiny network, two checkpoints."""
    make_study(tmp_path, images=6)
    monkeypatch.chdir(tmp_path)
    return CoseSettings(
        model="net.py:tiny", images="pictures", checkpoints=("epochs/*.pt",), methods=("gradcam", "gradient"),
        draws=2, unit_images=3, device="cpu", figures=False,
    )  # fmt: skip


def run(settings: CoseSettings, out: Path) -> CoseResult:
    return cose_study(replace(settings, out=out))


def digest(out: Path) -> str:
    from heatproof.store import RunFolder

    return RunFolder.open(out).scores().digest()


def test_a_study_writes_its_rows_tables_and_figures(study: CoseSettings, tmp_path: Path) -> None:
    result = run(replace(study, figures=True), tmp_path / "out")
    results = result.results
    assert results.images == 6 and results.checkpoints == ("random", "epoch01", "epoch02")
    per_image = 7 * 2 + 6 + 2  # transformed inputs and earlier checkpoints
    for method, score in results.scores.items():
        pooled = results.of(method)
        assert len(pooled) == 6 * per_image == score.n_same + score.n_changed + score.n_undefined
        usable = pooled.ssim[pooled.same & ~np.isnan(pooled.ssim)]
        assert score.consistency == pytest.approx(usable.mean())
    rows = result.folder.scores().sql(
        "select avg(value) as c from scores where metric like 'cose\\_same(%' escape '\\' "
        "and method = 'gradcam' and not isnan(value)"
    )
    assert rows[0]["c"] == pytest.approx(results.scores["gradcam"].consistency)
    page = result.page.read_text()
    for part in ("published: ResNet50", "r with accuracy", "photometric", "magnitudes.png", "violins.png"):
        assert part in page
    assert "/" + str(tmp_path).lstrip("/") not in page
    assert {p.name for p in (tmp_path / "out" / "tables").glob("*.csv")} == {
        "cose.csv", "networks.csv", "splits.csv", "table1.csv", "to_final.csv", "transforms.csv",
    }  # fmt: skip
    assert not math.isnan(results.accuracy["epoch02"])


def test_a_killed_study_goes_on_and_ends_the_same(
    study: CoseSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(study, tmp_path / "whole")
    from heatproof.store import RunFolder

    original, written = RunFolder.write_unit, []

    def dies(self: RunFolder, unit: Any, *args: Any, **more: Any) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(unit)
        original(self, unit, *args, **more)

    monkeypatch.setattr(RunFolder, "write_unit", dies)
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path / "broken")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    run(study, tmp_path / "broken")
    assert digest(tmp_path / "broken") == digest(whole.folder.path)


def test_another_checkpoint_or_method_costs_only_itself(study: CoseSettings, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(replace(study, checkpoints=("epochs/epoch02.pt",), final="epoch02"), out)
    before = {p.name: p.stat().st_mtime_ns for p in (out / "scores").glob("*.parquet")}
    grown = replace(study, checkpoints=("epochs/epoch02.pt", "epochs/epoch01.pt"), final="epoch02")
    result = run(grown, out)
    after = {p.name: p.stat().st_mtime_ns for p in (out / "scores").glob("*.parquet")}
    assert before.items() <= after.items() and len(after) == len(before) + 2  # two units of three images
    assert result.results.final == "epoch02" and "epoch01" in result.results.checkpoints
    result = run(replace(grown, methods=("gradcam", "gradient", "edges")), out)
    assert set(result.results.scores) == {"gradcam", "gradient", "edges"}
    with pytest.raises(HeatproofError, match="draws was 2 and is now 3"):
        run(replace(grown, draws=3), out)


def test_what_is_broken_is_reported_and_the_rest_goes_on(study: CoseSettings, tmp_path: Path) -> None:
    (tmp_path / "pictures" / "cat" / "000.png").write_bytes(b"not an image")
    (tmp_path / "epochs" / "epoch00.pt").write_bytes(b"not weights")
    result = run(study, tmp_path / "out")
    assert [f.id for f in result.failed] == ["cat/000.png"] and result.results.images == 5
    assert list(result.skipped) == ["epoch00"] and "epoch00" not in result.results.checkpoints
    page = result.page.read_text()
    assert "epoch00 was left out" in page and "cat/000.png" in page
    for method in result.results.methods:
        assert len(result.results.of(method)) == 5 * (7 * 2 + 6 + 2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"methods": ("gradcamm",)}, "unknown method"),
        ({"transforms": ("shear",)}, "unknown transform"),
        ({"images": "nowhere"}, "nowhere"),
        ({"final": "epoch77"}, "epoch77"),
        ({"model": "torchvision:resnet18", "checkpoints": ()}, "no trained weights"),
        ({"checkpoints": ("none*.pt",)}, "none"),
    ],
)
def test_bad_settings_raise_a_clear_error(
    study: CoseSettings, tmp_path: Path, change: Any, sentence: str
) -> None:
    with pytest.raises(HeatproofError, match=sentence):
        run(replace(study, **change), tmp_path / "out")
    assert not (tmp_path / "out" / "scores").exists()


def test_only_images_the_final_model_gets_right(study: CoseSettings, tmp_path: Path) -> None:
    everything = run(study, tmp_path / "out").results
    right = run(replace(study, require_correct=True), tmp_path / "out").results
    share = everything.accuracy["epoch02"]
    assert 0 < share < 1 and len(right.pairs) == round(share * len(everything.pairs))


def test_a_transformer_goes_the_same_way(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3}
    net = timm.create_model("vit_tiny_patch16_224", **options)
    torch.save(net.state_dict(), tmp_path / "vit.pt")
    made = f"timm.create_model('vit_tiny_patch16_224', **{options})"
    (tmp_path / "vit.py").write_text(f"import timm\n\n\ndef make():\n    return {made}\n")
    for i in range(2):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        (tmp_path / "pictures").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{i}.png")
    settings = CoseSettings(
        model=f"{tmp_path / 'vit.py'}:make", images=tmp_path / "pictures",
        checkpoints=(tmp_path / "vit.pt",), methods=("gradcam", "smoothgrad(samples=2)"), draws=1,
        device="cpu", figures=False,
    )  # fmt: skip
    results = run(settings, tmp_path / "out").results
    assert results.family == "transformer" and results.images == 2
    assert all(np.isfinite(results.of(m).ssim).any() for m in results.methods)
    assert math.isnan(results.accuracy["vit"])  # no labels, so no accuracy, and still a COSE


def test_the_command_and_its_file(study: CoseSettings, tmp_path: Path) -> None:
    (tmp_path / "cose.toml").write_text(
        'model = "net.py:tiny"\nimages = "pictures"\ncheckpoints = ["epochs/epoch0*.pt"]\n'
        'methods = ["gradcam", "edges"]\ndraws = 1\ndevice = "cpu"\nfigures = false\n'
    )
    first = CliRunner().invoke(cose_command, ["cose.toml", "--limit", "3", "--out", "one"])
    assert first.exit_code == 0, first.output
    assert "gradcam" in first.output and "summary.md" in first.output
    beside = CliRunner().invoke(
        cose_command, ["cose.toml", "--limit", "4", "--out", "two", "--beside", "one"]
    )
    assert beside.exit_code == 0, beside.output
    head = (tmp_path / "two" / "tables" / "table1.csv").read_text().splitlines()[0]
    assert head.count("pictures, net.py:tiny") == 2


def test_the_published_values_are_the_papers(papers: dict[str, Any]) -> None:
    golden = papers["cose"]
    assert len(COSE_METHODS) == len(golden["methods"])
    for name, row in TABLES.content["table1"]["published"].items():
        rows = [values for _, model, values in golden["rows"] if model == name] or [golden["overall_pub"]]
        assert row == pytest.approx(np.mean(rows, axis=0), abs=0.0051)


def test_every_registered_method_goes_through_cose(cnn: nn.Module) -> None:
    model = load_model(cnn, preprocess=Preprocess(size=(32, 32), resize=32))
    short = {"lime": "lime(samples=4, segment_count=9)", "rise": "rise(masks=4)",
             "smoothgrad": "smoothgrad(samples=2)",
             "integrated-gradients": "integrated-gradients(steps=2)", "blur-ig": "blur-ig(steps=2)",
             "guided-ig": "guided-ig(steps=3)", "gradient-shap": "gradient-shap(samples=2)",
             "kernel-shap": "kernel-shap(samples=8, segment_count=9)",
             "occlusion": "occlusion(window=16, stride=16)"}  # fmt: skip
    fitting = [e.name for e in explainers if e.architecture != "transformer"]
    fitting.remove("cam")  # needs global average pooling and one linear layer
    methods = [short.get(name, name) for name in fitting]
    pictures = torch.randint(0, 256, (1, 3, 32, 32), generator=torch.Generator().manual_seed(2)).to(
        torch.uint8
    )
    reference = explain(model, model.preprocess.from_bytes(pictures), methods)
    pairs = input_pairs(model, pictures, reference, draw(0, ["a"], 1, ["rotate", "flip-x", "brightness"]))
    for method in methods:
        defined = ~np.isnan(pairs.ssim[method])
        assert (np.abs(pairs.ssim[method][defined]) <= 1 + 1e-6).all()
        assert (pairs.why[method][~defined] > 0).all()


def test_threads_follow_the_setting(
    study: CoseSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    write = RunFolder.write_unit

    def noted(self: RunFolder, *given: Any, **more: Any) -> Any:
        seen.add(torch.get_num_threads())
        return write(self, *given, **more)

    monkeypatch.setattr(RunFolder, "write_unit", noted)
    before = torch.get_num_threads()
    run(replace(study, threads=before + 1), tmp_path / "out")
    assert seen == {before + 1} and torch.get_num_threads() == before
    assert "--threads" in CliRunner().invoke(cose_command, ["--help"]).output
