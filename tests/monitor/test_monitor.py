"""The monitor: its numbers, its cost, its folder, its alarms, and what it refuses before training starts."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import heatproof as hp
from conftest import counting, small_cnn
from heatproof.errors import InputError, StoreError, UnknownNameError
from heatproof.images import Preprocess
from heatproof.metrics import accuracy, auc, cscore_by_class, recall
from heatproof.metrics.cscores import gold_list
from heatproof.models import probabilities
from heatproof.monitor.measure import StepResult
from heatproof.monitor.watch import AlarmRaised, Monitor
from heatproof.run.plan import make_plan
from heatproof.run.score import group_rows
from heatproof.store import RunFolder

N = 22
LABELS = torch.tensor([0, 1, 1] * 7 + [0])


def pictures(n: int = N, size: int = 32) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(3))


def watch(**options: Any) -> Monitor:
    return Monitor(pictures(), LABELS, **{"batch_size": 8, "class_names": ["normal", "ill"], **options})


def measured(monitor: Monitor, model: nn.Module, epoch: int = 1) -> StepResult:
    report = monitor.step(model, epoch)
    assert report is not None and not report.problem, report
    return report


@pytest.fixture
def net() -> nn.Module:
    return small_cnn(2)


def test_numbers_are_those_of_explain_and_cscore_called_by_hand(net: nn.Module) -> None:
    report = measured(watch(methods=("gradcam", "layercam"), tau=0.4), net.train())
    maps = hp.explain(net, pictures(), ["gradcam", "layercam"], LABELS, batch_size=8)
    probs = probabilities(hp.load_model(net).logits(pictures())).double()
    for method in ("gradcam", "layercam"):
        by_hand = cscore_by_class(maps[method], LABELS, probs, tau=0.4)
        assert report.cscore[method] == by_hand.overall.value
        assert report.by_class[method] == {"normal": by_hand.classes[0], "ill": by_hand.classes[1]}
        assert report.degenerate[method] == maps[method].degenerate.double().mean()
    assert report.auc == auc(LABELS, probs).value
    assert report.accuracy == accuracy(LABELS, probs).value
    assert report.recall == dict(zip(["normal", "ill"], recall(LABELS, probs).classes.values(), strict=True))
    assert net.training


def test_a_step_makes_one_pass_over_the_images(net: nn.Module) -> None:
    monitor = watch(methods=("gradcam", "gradcam++", "layercam", "eigencam"))
    monitor.check(net)
    with counting(net) as passes:
        measured(monitor, net)
    assert sum(passes.batches) == N and max(passes.batches) <= 8 and passes.forward == math.ceil(N / 8)
    assert passes.backward == math.ceil(N / 8)


def test_numbers_do_not_depend_on_autocast_or_the_batch(net: nn.Module) -> None:
    plain = measured(watch(), net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = measured(watch(), net)
    assert inside.cscore == plain.cscore
    other = measured(watch(batch_size=5), net)
    assert other.cscore["gradcam"] == pytest.approx(plain.cscore["gradcam"], abs=1e-4)


def test_wrapped_and_compiled_models_give_the_same_numbers_and_compile_no_more(net: nn.Module) -> None:
    plain = measured(watch(), net.eval()).cscore
    assert measured(watch(), nn.DataParallel(net)).cscore == plain
    compiled: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    wrapped = torch.compile(net, backend=backend)
    wrapped(pictures())
    count = len(compiled)
    assert count > 0
    assert measured(watch(), wrapped).cscore == plain  # type: ignore[arg-type]
    net.compile(backend=backend)
    assert measured(watch(), net).cscore == plain
    wrapped(pictures())
    assert len(compiled) == count


def test_distributed_training_of_one_process(net: nn.Module, tmp_path: Path) -> None:
    plain = measured(watch(), net.eval()).cscore
    group = torch.distributed
    group.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(net)
        assert measured(watch(), wrapped).cscore == plain
        wrapped(pictures()).sum().backward()
    finally:
        group.destroy_process_group()


def test_under_inference_mode_as_validation_hooks_are(net: nn.Module) -> None:
    plain = measured(watch(), net).cscore
    with torch.inference_mode():
        assert measured(watch(), net).cscore == plain
    with torch.no_grad():
        assert measured(watch(), net).cscore == plain


def test_every_measures_the_first_epoch_and_every_nth(net: nn.Module) -> None:
    monitor = watch(every=5)
    done = [epoch for epoch in range(1, 12) if monitor.step(net, epoch) is not None]
    assert done == [1, 5, 10]
    assert [c.name for c in monitor.trajectory] == ["epoch-001", "epoch-005", "epoch-010"]


def test_the_subset_keeps_the_proportions_of_the_classes(net: nn.Module) -> None:
    monitor = watch(limit=11)
    report = measured(monitor, net)
    assert report.n == 11
    assert torch.bincount(monitor.images.labels).tolist() == [4, 7]


def test_a_step_that_takes_too_long_makes_the_subset_smaller(net: nn.Module, caplog: Any) -> None:
    monitor = watch(max_seconds=1e-4)
    first, second = measured(monitor, net, 1), measured(monitor, net, 2)
    assert first.n == N and second.n < N
    assert torch.bincount(monitor.images.labels).min() == 2  # a pair of each class is the least
    assert "the next steps use" in caplog.text
    measured(monitor, net, 3)
    assert "fewest possible" in caplog.text


def test_the_cost_is_stated(net: nn.Module) -> None:
    monitor = watch()
    report = measured(monitor, net)
    assert 0 < report.seconds <= monitor.cost.seconds
    assert 0 < monitor.cost.share < 1
    assert " s, " in str(monitor.cost)
    assert "C-Score gradcam" in str(report)


def test_sources_and_batches_bring_their_own_labels(net: nn.Module, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(12):
        folder = tmp_path / ("ill" if i % 2 else "normal")
        folder.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    (tmp_path / "ill" / "broken.png").write_bytes(b"nothing")
    ready = Preprocess((32, 32), 32)
    monitor = Monitor(tmp_path, preprocess=ready, batch_size=8)
    report = measured(monitor, net)
    assert (report.n, list(report.by_class["gradcam"])) == (12, ["ill", "normal"])
    assert [failure.id for failure in monitor.images.failures] == ["ill/broken.png"]
    held = monitor.images
    batches = [hp.Batch(held.ids[:5], held.images[:5], held.labels[:5])]
    batches.append(hp.Batch(held.ids[5:], held.images[5:], held.labels[5:]))
    again = measured(Monitor(batches, batch_size=8), net)
    assert again.cscore == report.cscore


@pytest.mark.parametrize(
    ("images", "labels", "options", "sentence"),
    [
        (pictures(), torch.zeros(N, dtype=torch.long), {}, "all 22 images have label 0"),
        (pictures(), LABELS[:-1], {}, "22 images but 21 labels"),
        (pictures(), LABELS.float(), {}, "one class number per image"),
        (pictures(), LABELS - 1, {}, "class numbers start at 0"),
        (pictures(), None, {}, "needs labels"),
        (pictures(), LABELS, {"class_names": ["only"]}, "only 1 class names"),
        (pictures()[:0], LABELS[:0], {}, "the batch is empty"),
        (pictures()[0], LABELS, {}, "add a batch axis"),
        (pictures() * math.nan, LABELS, {}, "NaN or infinite pixels"),
        ((pictures() * 20).byte(), LABELS, {}, "normalised floats"),
        (pictures(), LABELS, {"methods": "lime(sample=3)"}, "no option 'sample'"),
        (pictures(), LABELS, {"methods": ()}, "no method is named"),
        (pictures(), LABELS, {"every": 0}, "at least 1"),
        (pictures(), LABELS, {"tau": 2}, "tau must be"),
        (pictures(), LABELS, {"batch_size": 0}, "batch_size"),
        (pictures(), LABELS, {"limit": 0}, "limit"),
        (pictures(), LABELS, {"max_seconds": 0}, "max_seconds"),
        (pictures(), LABELS, {"loggers": [print]}, "log(report)"),
        (pictures(), LABELS, {"stop_on": "gold"}, "no mechanism 'gold'"),
    ],
)
def test_bad_input_is_refused_at_once(images: Any, labels: Any, options: Any, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        Monitor(images, labels, **options)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_methods_are_refused_at_once() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'gradcam'"):
        watch(methods=["gradcamm"])


def test_a_model_that_does_not_fit_is_refused_before_training(net: nn.Module) -> None:
    three = (LABELS + 1).tolist()
    with pytest.raises(InputError, match="labels do not match the model's outputs: target 2"):
        Monitor(pictures(), three).check(net)
    with pytest.raises(InputError, match="3 class names, but the model has 2"):
        watch(class_names=["a", "b", "c"]).check(net)
    with pytest.raises(InputError, match="cannot take images"):
        Monitor(torch.randn(N, 5, 32, 32), LABELS).check(net)
    watch().check(small_cnn(1))  # one logit is two classes


def test_a_step_that_fails_says_so_and_training_goes_on(net: nn.Module, caplog: Any) -> None:
    monitor = watch()
    with torch.no_grad():
        net[0].weight.fill_(math.nan)
    for epoch in (1, 2):
        report = monitor.step(net, epoch)
        assert report is not None and "NaN" in report.problem and math.isnan(report.auc)
        assert report.cscore == {} and report.scalars().keys() == {"heatproof/seconds"}
    assert len(monitor.trajectory) == 0
    assert "epoch 1 was not measured" in caplog.text and len(caplog.records) == 1


class Blanked(nn.Module):
    """Knows the class from one pixel and shows a spot for it; the spot of class 1 can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 2, 1, bias=False)
        nn.init.constant_(self.features.weight, 1.0)
        self.blank = False

    def forward(self, images: Tensor) -> Tensor:
        level = images[:, :, 0, 0].mean(1)
        if self.blank:
            images = torch.where((level > 0)[:, None, None, None], 0 * images, images)
        return torch.stack([-level, level], 1) + 1e-3 * self.features(images).mean((2, 3))


def spots() -> tuple[Tensor, Tensor]:
    labels = torch.tensor([0, 1] * 12)
    images = 0.1 * torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images[:, :, 6:10, 6:10] += 5
    images[:, :, 0, 0] = (labels * 2 - 1)[:, None].float()
    return images, labels


def test_alarms_are_reported_once_and_may_stop_training(caplog: Any) -> None:
    model, reported = Blanked(), []
    images, labels = spots()
    options: Any = {"methods": ["layercam"], "layer": "features", "class_names": ["a", "b"]}
    monitor = Monitor(images, labels, on_alarm=reported.append, **options)
    assert measured(monitor, model, 1).alarms == ()
    model.blank = True
    second, third = measured(monitor, model, 2), measured(monitor, model, 3)
    assert [(a.mechanism, a.class_name, a.checkpoint) for a in reported] == [(2, "b", "epoch-002")]
    assert second.new_alarms == tuple(reported)
    assert len(third.alarms) == 1 and third.new_alarms == ()
    assert not caplog.records  # on_alarm speaks instead

    loud = Monitor(images, labels, **options)
    assert measured(loud, model, 1).alarms == () and not caplog.text  # two checkpoints make a training
    assert measured(loud, model, 2).new_alarms
    assert "attribution collapse (critical): At epoch-002" in caplog.text
    strict = Monitor(images, labels, stop_on="attribution collapse", **options)
    measured(strict, model, 1)
    with pytest.raises(AlarmRaised, match="stopped after epoch 2"):
        strict.step(model, 2)
    calm = Monitor(images, labels, stop_on="class masking", **options)
    measured(calm, model, 1)
    measured(calm, model, 2)


def test_the_run_folder_holds_what_a_run_would(net: nn.Module, tmp_path: Path) -> None:
    monitor = watch(out=tmp_path / "run", methods=("gradcam", "layercam"))
    report = measured(monitor, net, 1)
    with torch.no_grad():
        net[-1].bias.add_(0.1)
    measured(monitor, net, 2)
    folder = RunFolder.open(tmp_path / "run")
    plan = make_plan(folder.manifest, N)
    assert {unit.hash for unit in plan.units} == folder.done()
    assert list(folder.manifest.classes) == ["normal", "ill"]
    assert len(list((tmp_path / "run" / "pictures").iterdir())) == N

    def rows(scores: Any) -> dict[Any, Any]:
        keys = ("model", "checkpoint", "image", "label", "explained", "method", "metric")
        return {tuple(getattr(row, key) for key in keys): row.value for row in scores}

    ids = monitor.images.ids
    for unit in plan.groups:
        query = "select * exclude (unit) from scores where unit = ?"
        ours = rows(hp.Score(**row) for row in folder.scores().sql(query, [unit.hash]))
        theirs = rows(group_rows(folder, unit, ids, "Sequential"))
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():  # theirs are made from maps in half precision
            assert ours[key] == pytest.approx(value, abs=2e-3, nan_ok=True)
    stored = folder.scores().sql(
        "select value from scores where checkpoint = 'epoch-001' and metric = 'cscore' "
        "and method = 'gradcam' and label is null"
    )
    assert stored[0]["value"] == report.cscore["gradcam"]
    maps = hp.explain(net, pictures(), "gradcam", LABELS, batch_size=8)["gradcam"].normalised()
    saved = folder.maps().read("epoch-002", "gradcam", ids).normalised()
    assert (saved - maps).abs().max() < 2e-3


def test_a_run_folder_is_resumed(net: nn.Module, tmp_path: Path, caplog: Any) -> None:
    first = watch(out=tmp_path)
    for epoch in (1, 2, 3):
        with torch.no_grad():
            net[-1].bias.add_(0.1)
        measured(first, net, epoch)
    again = watch(out=tmp_path)
    assert [c.name for c in again.trajectory] == ["epoch-001", "epoch-002", "epoch-003"]
    for now, then in zip(again.trajectory, first.trajectory, strict=True):
        assert repr(now) == repr(replace(then, methods=dict(sorted(then.methods.items()))))
    measured(again, net, 3)  # the same weights: nothing new
    assert list(RunFolder.open(tmp_path).manifest.models) == ["epoch-001", "epoch-002", "epoch-003"]
    with torch.no_grad():
        net[-1].bias.add_(0.5)
    report = measured(again, net, 2)  # taken up from epoch 1
    assert report.checkpoint == "attempt2-epoch-002"
    assert [c.name for c in again.trajectory] == ["epoch-001", "attempt2-epoch-002"]
    assert [record.getMessage()[:19] for record in caplog.records] == [
        "epoch 3 comes again",
        "epoch 2 comes after",
    ]
    with pytest.raises(StoreError, match="methods"):
        watch(out=tmp_path, methods=["layercam"])
    with pytest.raises(StoreError, match="images are not those of the run"):
        Monitor(pictures() + 1, LABELS, batch_size=8, class_names=["normal", "ill"], out=tmp_path)


def test_a_smaller_subset_still_makes_a_whole_run(net: nn.Module, tmp_path: Path) -> None:
    monitor = watch(out=tmp_path, max_seconds=1e-4, batch_size=4)
    measured(monitor, net, 1)
    with torch.no_grad():
        net[-1].bias.add_(0.1)
    report = measured(monitor, net, 2)
    folder = RunFolder.open(tmp_path)
    assert {unit.hash for unit in make_plan(folder.manifest, N).units} == folder.done()
    query = "select count(distinct image) as n from scores where checkpoint = ? and image <> ''"
    assert folder.scores().sql(query, ["epoch-002"]) == [{"n": report.n}]


def test_a_folder_that_cannot_be_written_costs_no_numbers(
    net: nn.Module, tmp_path: Path, caplog: Any
) -> None:
    monitor = watch(out=tmp_path / "run")
    measured(monitor, net, 1)
    (tmp_path / "run" / "scores").rename(tmp_path / "away")
    (tmp_path / "run" / "scores").write_text("in the way")
    with torch.no_grad():
        net[-1].bias.add_(0.1)
    assert measured(monitor, net, 2).cscore
    assert "epoch 2 is not stored" in caplog.text


def test_without_a_folder_nothing_is_written_and_little_is_imported(tmp_path: Path) -> None:
    script = """
import sys, json, torch
for name in ("duckdb", "msgspec", "segno", "matplotlib"): sys.modules[name] = None
from heatproof.monitor.watch import Monitor
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
                          torch.nn.Flatten(), torch.nn.Linear(4, 2))
report = Monitor(torch.randn(8, 3, 8, 8), torch.arange(8) % 2).step(net, 1)
assert not report.problem, report.problem
print(json.dumps([m for m in ("lightning", "keras", "transformers", "mlflow", "wandb") if m in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [] and list(tmp_path.iterdir()) == []


def test_the_rows_of_a_monitor_have_the_reasons_of_a_run(tmp_path: Path) -> None:
    """A third class without images: AUC and recall leave it out, and say so beside a defined number."""
    monitor = Monitor(pictures(), LABELS, ["gradcam"], batch_size=8, out=tmp_path / "run")
    measured(monitor, small_cnn(3))
    folder = RunFolder.open(tmp_path / "run")
    for unit in make_plan(folder.manifest, N).groups:
        query = "select method, label, metric, reason from scores where unit = ?"
        ours = {tuple(row.values()) for row in folder.scores().sql(query, [unit.hash])}
        theirs = group_rows(folder, unit, monitor.images.ids, "Sequential")
        assert ours == {(row.method, row.label, row.metric, row.reason) for row in theirs}
    query = "select reason from scores where metric = 'auc' and label is null"
    assert folder.scores().sql(query)[0]["reason"].startswith("left out: class 2")


def test_a_method_without_a_finite_map_says_so(net: nn.Module) -> None:
    monitor = watch(methods=("gradcam", "edges"))
    with torch.no_grad():
        net[0].weight.fill_(math.nan)

    class Answers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).nan_to_num() + x.mean((2, 3))[:, :2]

    report = measured(monitor, Answers())
    assert {s.reason for s in report.by_class["gradcam"].values()} == {
        "every map of this method has NaN or infinite values"
    }
    assert all(math.isnan(s.value) for s in report.by_class["gradcam"].values())
    assert not math.isnan(report.cscore["edges"])


class Counting(nn.Module):
    """Buffers that a forward pass changes: in place, by replacement, by a BatchNorm that it trains itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = small_cnn(2), nn.BatchNorm2d(3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[assignment]
        self.last = x.mean((0, 2, 3))
        self.norm.train()
        return self.net(self.norm(x))


def test_buffers_that_forward_changes_come_back() -> None:
    net = Counting()
    before, objects = {k: v.clone() for k, v in net.state_dict().items()}, dict(net.named_buffers())
    monitor = watch()
    monitor.check(net)
    measured(monitor, net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(buffer is objects[name] for name, buffer in net.named_buffers())


def test_a_buffer_that_forward_adds_is_reported(caplog: Any) -> None:
    class Caching(Counting):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "cache"):
                self.register_buffer("cache", torch.ones(2))
            return super().forward(x) + self.cache

    monitor, net = watch(), Caching()
    for epoch in (1, 2):
        measured(monitor, net, epoch)
    assert caplog.text.count("forward adds the buffer cache, which the monitor cannot remove") == 1


def test_epochs_that_repeat_or_go_back_are_reported_once(net: nn.Module, caplog: Any) -> None:
    monitor = watch()
    for epoch in (1, 2, 3, 3, 3, 2):
        measured(monitor, net, epoch)
    assert [c.epoch for c in monitor.trajectory] == [1, 2]
    assert caplog.text.count("epoch 3 comes again, so the results from epoch 3 on are dropped") == 1
    assert caplog.text.count("epoch 2 comes after epoch 3, so") == 1


def test_gold_lists_of_a_monitor_may_be_adaptive(net: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tau must be a number in"):
        watch(tau="most")
    report = measured(watch(tau="adaptive", out=tmp_path / "run"), net)
    again = watch(tau="adaptive", out=tmp_path / "run")
    assert again.trajectory.checkpoints[0].methods["gradcam"].overall.value == report.cscore["gradcam"]
    probs = probabilities(hp.load_model(net).logits(pictures())).double()
    gold = gold_list(LABELS, probs, "adaptive")
    for c, state in again.trajectory.checkpoints[0].classes.items():
        assert state.gold == int(gold[c == LABELS].sum())
