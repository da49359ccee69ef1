"""GPU memory: the limit of a run, work in smaller parts, recordings with a limit, runs at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import heatproof as hp
from conftest import needs_cuda, small_cnn
from heatproof.errors import InputError
from heatproof.models import accel, default_layer
from heatproof.models.accel import Accelerator, in_parts, limited_memory
from heatproof.models.derived import copy_of
from heatproof.store import RunFolder

GIB = 2**30
CPU = torch.device("cpu")


class Short:
    """Work for which memory runs out above a number of inputs, and sometimes for a single one."""

    def __init__(self, most: int, failures: int = 0) -> None:
        self.most, self.failures, self.sizes = most, failures, list[int]()

    def __call__(self, start: int, stop: int) -> range:
        self.sizes.append(stop - start)
        if stop - start > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return range(start, stop)


@pytest.mark.parametrize(("count", "most"), [(1, 1), (7, 7), (11, 3), (64, 5), (9, 1)])
def test_all_inputs_are_computed_once_and_parts_never_grow(count: int, most: int) -> None:
    work, shrunk = Short(most), list[int]()
    parts = list(in_parts(CPU, "small", count, work, shrunk=shrunk.append))
    assert [i for part, _ in parts for i in part] == list(range(count))
    assert [inputs for _, inputs in parts] == [len(part) for part, _ in parts]
    assert shrunk == sorted(shrunk, reverse=True) and all(size <= most for _, size in parts)
    assert len(work.sizes) == len(parts) + len(shrunk)


def test_a_single_input_is_tried_again_on_a_gpu_and_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, waited = torch.device("cuda"), list[float]()
    with pytest.raises(torch.OutOfMemoryError):
        list(in_parts(CPU, "small", 2, Short(0)))
    monkeypatch.setattr(accel.time, "sleep", waited.append)
    monkeypatch.setattr(accel, "release_memory", lambda *_: None)
    parts = list(in_parts(gpu, "small", 2, Short(1, failures=2)))
    assert [list(part) for part, _ in parts] == [[0], [1]] and waited == list(accel.WAITS[:2])
    with pytest.raises(torch.OutOfMemoryError):
        list(in_parts(gpu, "small", 1, Short(0)))
    assert len(waited) == 2 + len(accel.WAITS)


def test_on_a_gpu_a_part_is_tried_again_at_its_size_before_it_is_halved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that caches and recordings occupied is free then, and rows keep their bits."""
    released = list[torch.device]()
    monkeypatch.setattr(accel, "release_memory", released.append)
    gpu, work, shrunk = torch.device("cuda"), Short(8, failures=1), list[int]()
    assert len(list(in_parts(gpu, "once short", 8, work, shrunk=shrunk.append))) == 1
    assert work.sizes == [8, 8] and not shrunk and released == [gpu] and not caplog.text
    work = Short(5)
    assert [size for _, size in in_parts(gpu, "too short", 8, work, shrunk=shrunk.append)] == [4, 4]
    assert work.sizes == [8, 8, 4, 4] and shrunk == [4] and "a pass of 8 images does not fit" in caplog.text


class Once(nn.Module):
    """A network with a pass, or a copy, that fails for lack of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.left = -1  # passes or copies until the one that fails

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def forward(self, images: Tensor) -> Tensor:
        self.count()
        return self.head(self.norm(self.conv(images)).relu().mean((2, 3)))

    def __deepcopy__(self, memo: object) -> Once:
        self.count()
        return self


CHOICES: dict[str, Callable[[hp.Model, Tensor], object]] = {
    "layer": default_layer,
    "folding": lambda model, image: len(Accelerator(model).folding(image).parts),
    "copy": lambda model, _image: copy_of(model).name,
}


@pytest.mark.parametrize("attempt", [1, 2])
def test_the_check_before_a_run_goes_on_if_memory_runs_out_once(attempt: int) -> None:
    net = Once().eval()
    net.left = attempt
    hp.load_model(net).check_repeatable(torch.randn(2, 3, 8, 8))
    assert net.left < 0


@pytest.mark.parametrize(
    ("choice", "attempt", "expected"),
    [("layer", 1, "norm+relu"), ("folding", 1, 2), ("folding", 2, 2), ("copy", 1, "Once")],
)
def test_nothing_is_chosen_by_a_pass_that_ran_out_of_memory(
    choice: str, attempt: int, expected: object
) -> None:
    net = Once().eval()
    model, image = hp.load_model(net), torch.randn(1, 3, 8, 8)
    model.logits(image)
    net.left = attempt
    with pytest.raises(torch.OutOfMemoryError):
        CHOICES[choice](model, image)
    assert CHOICES[choice](model, image) == expected


def test_other_errors_are_raised_at_once() -> None:
    def fails(start: int, stop: int) -> None:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        list(in_parts(CPU, "small", 4, fails))


@pytest.mark.parametrize("text", ["half", "0", "1.5", "nan"])
def test_a_share_is_a_number_up_to_one(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(accel.MEMORY, text)
    with pytest.raises(InputError, match=f"from 0 to 1; got '{text}'"), limited_memory("cpu"):
        pass


class Sized:
    """A recording that takes memory."""

    def __init__(self, size: int) -> None:
        self.bytes = size


def test_the_largest_recordings_of_all_networks_are_dropped_until_the_rest_fits() -> None:
    first, second = accel.Graphs(), accel.Graphs()
    first.recordings.update({("a", 1): Sized(5), ("b", 1): Sized(2)})
    second.recordings.update({("a", 1): Sized(3)})
    accel.drop_recordings(6)
    assert list(first.recordings) == [("b", 1)] and list(second.recordings) == [("a", 1)]
    accel.drop_recordings()
    assert not first.recordings and not second.recordings


@needs_cuda
def test_a_run_takes_a_quarter_of_the_free_memory_and_gives_it_back() -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    with limited_memory("cuda"):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.3 * free), dtype=torch.uint8, device="cuda")
        block = torch.empty(int(0.2 * free), dtype=torch.uint8, device="cuda")
        with limited_memory("cuda"), pytest.raises(torch.OutOfMemoryError):  # a limit inside is no larger
            torch.empty(int(0.2 * free), dtype=torch.uint8, device="cuda")
        del block
    assert torch.cuda.mem_get_info()[0] > 0.95 * free
    torch.empty(int(0.3 * free), dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()


@needs_cuda
def test_recordings_of_many_networks_share_a_pool_and_stay_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.cuda.empty_cache()
    limit = 64 * 2**20
    monkeypatch.setattr(accel, "_most_bytes", lambda _device: limit)
    images = torch.randn(64, 3, 64, 64, device="cuda")
    models = [hp.load_model(small_cnn().eval(), device="cuda") for _ in range(6)]
    expected = [hp.explain(model, images[:32], ["gradcam", "layercam"]) for model in models]
    for _ in range(5):
        for model in models:
            hp.explain(model, images, ["gradcam", "layercam", "rise(masks=300)"])
    every = [recording for entry in list(accel._every) for recording in entry.recordings.values()]
    assert every and len({recording.pool for recording in every if recording.pool}) == 1
    assert sum(recording.bytes for recording in every) <= limit + max(recording.bytes for recording in every)
    for model, before in zip(models, expected, strict=True):
        for method, maps in hp.explain(model, images[:32], ["gradcam", "layercam"]).items():
            torch.testing.assert_close(maps.values, before[method].values, rtol=1e-2, atol=1e-4)


STUDY = """
methods = ["gradcam", "gradient", "smoothgrad(samples=16)", "rise(masks=256)"]
metrics = ["accuracy", "insertion(steps=20)", "deletion(steps=20)", "randomisation(depths=2)",
  "specificity(draws=2)", "cscore", "method_agreement"]
[run]
batch_size = 60
threads = 1
device = "cuda"
precision = "fp32"
workers = 2
[model]
spec = "torchvision:squeezenet1_1"
num_classes = 2
checkpoints = "weights.pt"
[images]
kind = "folder"
path = "pictures"
"""


RUN = f"""
import atexit, torch
from heatproof.cli import main
torch.cuda.set_per_process_memory_fraction({8 * GIB} / torch.cuda.mem_get_info()[1])
atexit.register(lambda: print("allocations that failed:", torch.cuda.memory_stats().get("num_ooms")))
main()
"""  # cuDNN computes with another algorithm, thus other last bits, if there is no memory for its first choice


@needs_cuda
def test_three_runs_at_once_with_8_gb_each_give_the_rows_of_a_single_run(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    from benchmarks.common import write_pictures

    torch.manual_seed(0)
    write_pictures(tmp_path / "pictures", 60)
    weights = hp.load_model("torchvision:squeezenet1_1", num_classes=2).module.state_dict()
    torch.save(weights, tmp_path / "weights.pt")
    (tmp_path / "study.toml").write_text(STUDY)
    torch.cuda.empty_cache()

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RUN, "run", "study.toml", "--out", name]
        # All: a share of the free memory would give each run another limit, by what the others hold already.
        environment = os.environ | {accel.MEMORY: "1"}
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def rows(name: str) -> dict[tuple[object, ...], float]:
        keys = "image, label, explained, method, metric"
        table = RunFolder.open(tmp_path / name).scores().sql(f"select {keys}, value from scores")
        return {tuple(row[key] for key in keys.split(", ")): row["value"] for row in table}

    def inputs_per_pass(name: str) -> object:
        return RunFolder.open(tmp_path / name).manifest.config["run"]["inputs_per_pass"]

    together = {name: start(name) for name in ("one", "two", "three")}
    texts = {name: process.communicate(timeout=240)[0] for name, process in together.items()}
    for name in ("single", "again"):  # two, to tell what other runs change from what changes by itself
        together[name] = start(name)
        texts[name] = together[name].communicate(timeout=240)[0]
    assert together["single"].returncode == 0, texts["single"]
    expected, inputs = rows("single"), inputs_per_pass("single")
    for name, process in reversed(together.items()):
        assert process.returncode == 0, texts[name]
        assert "prototype feature" not in texts[name] and "Warning" not in texts[name], texts[name]
        result = rows(name)
        assert expected.keys() == result.keys() and inputs_per_pass(name) == inputs
        known = {key: value for key, value in expected.items() if value == value}
        apart = [(key, value, result[key]) for key, value in known.items() if abs(result[key] - value) > 1e-5]
        assert not apart, (name, inputs, len(apart), apart[:5], texts[name][-2000:])
