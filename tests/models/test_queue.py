"""The queue: how many inputs a pass takes, what is remembered, and that memory stays flat."""

from __future__ import annotations

import gc
import logging
import platform
import subprocess
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn

import heatproof as hp
from conftest import counting, needs_cuda, small_cnn
from heatproof.errors import InputError
from heatproof.models import accel
from heatproof.models.accel import Accelerator, Graphs, usual_batch
from heatproof.models.model import Queue, all_logits
from heatproof.models.running import frozen_eval

CPU = torch.device("cpu")


@pytest.fixture
def model() -> hp.Model:
    return hp.load_model(small_cnn().eval())


def job(model: hp.Model, count: int, batch_size: int | None = None, size: int = 32) -> Tensor:
    image = torch.linspace(-1, 1, 3 * size * size).view(1, 3, size, size)

    def make(start: int, stop: int) -> Tensor:
        return image * torch.arange(start, stop).view(-1, 1, 1, 1) / count

    with frozen_eval(model.module):
        return Queue(model, (size, size), batch_size).predict(count, make, lambda logits, *_: logits)


def test_the_last_two_batches_share_what_is_left(model: hp.Model) -> None:
    for count, sizes in ((70, [32, 19, 19]), (64, [32, 32]), (33, [17, 16]), (32, [32]), (7, [7])):
        with counting(model.module) as passes:
            job(model, count, batch_size=32)
        assert passes.batches == sizes


def test_jobs_of_any_length_take_the_usual_batch(model: hp.Model) -> None:
    assert usual_batch(CPU, (224, 224)) == 8 and usual_batch(CPU, (32, 32)) == 128
    assert usual_batch(torch.device("cuda"), (224, 224)) == 256 and usual_batch(CPU, (4000, 4000)) == 1
    for count, sizes in ((200, [100, 100]), (1280, [128] * 10)):
        with counting(model.module) as passes:
            job(model, count)
        assert [size for size in passes.batches if size > 1] == sizes  # one input tries the folded network
    assert Accelerator(model).run_batch_size() == usual_batch(CPU, model.preprocess.size)


FAULTS = """
import resource, torch
from heatproof.models.accel import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(16 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
keep_freed_memory()
faults()
print(first, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_reused_and_not_requested_from_the_system_again() -> None:
    ran = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    before, after = map(int, ran.stdout.split())
    assert after < before / 10, ran.stdout


@pytest.mark.parametrize(("gib", "expected"), [(200.0, 256), (20.5, 256), (15.0, 128), (4.0, 32), (0.01, 1)])
def test_on_a_gpu_a_run_takes_as_many_inputs_as_fit(
    model: hp.Model, gib: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes as reported by torch for 80 MiB per input; 1.5 GiB are in use."""
    used, each, widths = int(1.5 * 2**30), 80 * 2**20, list[int]()
    forward = hp.Model.forward

    def watched(self: hp.Model, images: Tensor) -> Tensor:
        widths.append(len(images))
        assert images.requires_grad, "activations are kept, as for gradients"
        return forward(self, images)

    memory = {
        "memory_allocated": lambda _device: used,
        "max_memory_allocated": lambda _device: used + each * widths[0],
        "mem_get_info": lambda _device: (0, 4 * (used + int(gib * 2**30))),
        "get_per_process_memory_fraction": lambda _device: 0.25,
        "reset_peak_memory_stats": lambda _device: None,
    }
    for name, function in memory.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(hp.Model, "forward", watched)
    monkeypatch.setattr(accel, "usual_batch", lambda _device, _size: 256)
    with frozen_eval(model.module):
        assert Accelerator(model).fitting_batch_size(torch.randn(8, 3, 32, 32)) == expected
    assert widths == [8]


@needs_cuda
def test_passes_of_the_fitting_size_do_not_run_out_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    loaded = hp.load_model(small_cnn().eval(), device="cuda")
    images = torch.randn(96, 3, 224, 224, device="cuda")
    accel.release_memory(images.device)
    before, total = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]
    fraction = accel.memory_fraction(images.device)
    torch.cuda.set_per_process_memory_fraction((before + 2**30) / total)
    try:
        loaded.inputs_per_pass = size = Accelerator(loaded).run_batch_size()
        with caplog.at_level(logging.WARNING):
            hp.explain(loaded, images, ["gradient", "smoothgrad(samples=4)", "rise(masks=8)"])
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction)
    assert 1 < size < 256 and "memory" not in caplog.text


def test_on_a_gpu_passes_that_keep_activations_are_a_quarter(
    model: hp.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hp.Model, "device", torch.device("cuda"))
    for batch_size, expected in ((None, [256, 64]), (32, [32, 32])):
        queue = Queue(model, (224, 224), batch_size)
        assert [queue._next(1000, kind) for kind in ("forward", "gradients")] == expected


def test_an_explicit_batch_size_scales_with_image_area(model: hp.Model) -> None:
    fixed = hp.Model(model.module, preprocess=model.preprocess, inputs_per_pass=64)
    height, width = fixed.preprocess.size
    assert Accelerator(fixed).batch_size((height, width)) == 64
    assert Accelerator(fixed).batch_size((2 * height, 2 * width)) == 16
    with counting(fixed.module) as passes:
        job(fixed, 32, size=2 * height)
    assert passes.batches == [16, 16]
    with pytest.raises(InputError, match="inputs_per_pass must be at least 1"):
        hp.Model(model.module, inputs_per_pass=0)


def test_answers_do_not_depend_on_the_batch(model: hp.Model) -> None:
    model.module.double()
    expected = job(model, 100)
    for size in (1, 7, 16, 64):
        torch.testing.assert_close(job(model, 100, size), expected, atol=1e-12, rtol=1e-12)


def test_what_fitted_into_memory_is_remembered_by_kind_of_pass(model: hp.Model) -> None:
    seen: list[int] = []

    def short_of_memory(_m: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(len(args[0]))
        if len(args[0]) > 10:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    with model.module.register_forward_pre_hook(short_of_memory):
        job(model, 40)
        assert seen == [40, 20, 10, 10, 10, 10]
        job(model, 20)
        assert seen[6:] == [10, 10]
    hp.explain(model, torch.zeros(12, 3, 32, 32), "gradcam")
    assert model.facts.fits == {("forward", (32, 32)): 10}


METHODS = ["gradcam", "eigencam", "scorecam(channels=4)", "smoothgrad(samples=2)", "rise(masks=300)"]


def alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_memory_is_flat_over_many_images_and_released_with_the_model() -> None:
    model = hp.load_model(small_cnn().eval())
    images = torch.randn(4, 3, 32, 32)
    hp.explain(model, images, METHODS)
    before = alive()
    for _ in range(5):
        hp.explain(model, images, METHODS)
    assert alive() <= before
    folding = weakref.ref(model.facts.acceleration.folding[1])
    assert folding() is not None
    module, gone = weakref.ref(model.module), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and folding() is None and module() is None


def test_a_pass_looks_for_no_buffer(model: hp.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device and type are those of the first weight: to look at all buffers takes long in a large network."""
    monkeypatch.setattr(model.module, "buffers", lambda: pytest.fail("buffers were looked for"))
    assert model.device == CPU and model.dtype == torch.float32


class HoldsThree(nn.Module):
    """A network whose memory holds three images."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_cnn()

    def forward(self, images: Tensor) -> Tensor:
        if len(images) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        scores: Tensor = self.net(images)
        return scores


def test_a_pass_that_memory_does_not_hold_is_halved_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = HoldsThree().eval()
    model, images = hp.load_model(net), torch.randn(11, 3, 32, 32)
    with caplog.at_level(logging.WARNING, "heatproof"):
        torch.testing.assert_close(model.logits(images), net.net(images), rtol=1e-5, atol=1e-6)
        assert len(all_logits(model, images, 8)) == 11
    other, recording = Graphs(), object()
    other.recordings["logits", 8] = recording
    model.logits(images)
    assert not other.recordings  # of any network: the memory of a recording serves nothing else
    (record,) = caplog.records
    assert "a pass of 11 images does not fit into memory; smaller passes are run" in record.getMessage()


@needs_cuda
def test_a_gpu_s_memory_that_runs_out_is_no_end_of_a_pass() -> None:
    net = nn.Sequential(nn.Conv2d(3, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = hp.load_model(net.eval(), device="cuda")
    images = torch.rand(64, 3, 512, 512, device="cuda")
    few = model.logits(images[:2])
    torch.cuda.empty_cache()
    share = (torch.cuda.memory_allocated() + 8 * 2**30) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        torch.testing.assert_close(model.logits(images)[:2], few, rtol=1e-4, atol=1e-5)
        maps = hp.explain(model, images, ["gradient", "rise(masks=8)"])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(maps["gradient"].values) == len(maps["rise(masks=8)"].values) == 64
