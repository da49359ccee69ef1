"""One Grad-CAM as users call it: of a plain module, beside a loaded model and beside grad-cam and captum.

Every contender explains class 0 of the same images, and captum also the predicted class, for which it needs
a forward pass before, unlike the others. The bare pass is a forward pass with frozen weights and a
backward pass that stops at the layer, the least that Grad-CAM needs. On a CPU one thread is measured, by the
CPU's own clock, which does not count other programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.common import Part, Row, cost, network, side_by_side, speed
from benchmarks.explain import FASTER, captum_gradcam, grad_cam
from benchmarks.sections import BenchOptions
from benchmarks.steady import in_use
from heatproof.explain.api import explain
from heatproof.models.accel import keep_freed_memory
from heatproof.models.model import all_logits
from heatproof.run.worker import fixed_threads

LAYERS = {"resnet18": "layer4", "resnet50": "layer4", "squeezenet1_1": "features", "mobilenet_v2": "features"}


def parts(options: BenchOptions) -> Iterator[Part]:
    """ResNet-50 at three batch sizes on a GPU, several networks and one image on a CPU."""
    names, batches = (("resnet50",), (1, 32, 256)) if options.gpu else (tuple(LAYERS), (1,))
    if options.quick:
        names, batches = names[:1], batches[:1]
    for name in names:
        for batch in batches:
            made = partial(rows, name, batch, options.device, 3 if options.quick else 20)
            yield Part(f"Grad-CAM of {name}, batch {batch}", made, options.device)
    yield Part("first answer", partial(first_answer, names[0], options.device), options.device)
    if not options.gpu:
        yield Part("freed memory", partial(kept_memory, names, 1 if options.quick else 3))


def bare_pass(module: nn.Module, images: Tensor, layer: str) -> Callable[[], object]:
    for weight in module.parameters():
        weight.requires_grad_(False)

    def run() -> object:
        leaves: list[Tensor] = []

        def cut(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            leaves.append(output.detach().requires_grad_())
            return leaves[0].clone()

        with module.get_submodule(layer).register_forward_hook(cut):
            score = module(images)[:, 0].sum()
        return torch.autograd.grad(score, leaves)

    return run


def rows(name: str, batch: int, device: str, repeat: int) -> list[Row]:
    torch.manual_seed(0)
    images = torch.randn(batch, 3, 224, 224, device=device)
    loaded, plain, other, bare = (network(name, device) for _ in range(4))
    layer = LAYERS[name]
    contenders: dict[str, Callable[[], object]] = {
        "plain": partial(explain, plain.module, images, targets=0, layer=layer, batch_size=batch),
        "loaded": partial(explain, loaded, images, targets=0, layer=layer, batch_size=batch),
        "bare": bare_pass(bare.module, images, layer),
    }
    if find_spec("captum"):
        contenders["captum"] = captum_gradcam(other, images, layer=layer)
        contenders["captum, predicted class"] = captum_gradcam(other, images, predicts=True, layer=layer)
        contenders["through"] = partial(
            explain, loaded, images, "captum:LayerGradCam", targets=0, layer=layer
        )
    if find_spec("pytorch_grad_cam"):
        contenders["grad-cam"] = grad_cam(other, images, "GradCAM", layer)
    with fixed_threads(1):
        ms = side_by_side(contenders, repeat, device, clock=time.process_time)
    what = f"Grad-CAM of a plain module, {name}, batch {batch}"
    result = [
        cost(what, ms["plain"], "loaded model", ms["loaded"], "<= 1.1"),
        cost(what, ms["plain"], "bare pass", ms["bare"]),
    ]
    limit = ">= 1" if device == "cpu" else ""
    if device == "cpu":  # on a GPU a bare pass takes longer, as its kernels are launched one by one
        own = ms["plain"] - ms["bare"]
        result.append(Row(f"{what}: own milliseconds", ms["plain"], "bare pass", ms["bare"], own, "<= 8"))
    packages = [name for name in ("captum", "captum, predicted class", "grad-cam") if name in ms]
    result += [speed(what, ms["plain"], name, ms[name], limit, FASTER) for name in packages]
    if "through" in ms:
        through = f"captum:LayerGradCam through heatproof, {name}, batch {batch}"
        result.append(cost(through, ms["through"], "captum", ms["captum"]))
    if device.startswith("cuda"):
        peaks = [peak(contenders[key]) for key in ("plain", "bare")]
        result.append(cost(f"{what}: peak memory (MiB, not ms)", peaks[0], "bare pass", peaks[1]))
    return result


def peak(contender: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    contender()
    return in_use("cuda")


def first_answer(name: str, device: str) -> list[Row]:
    """The first call on a new module, which analyses it, beside a later one."""
    images = torch.randn(1, 3, 224, 224, device=device)
    explain(network(name, device), images)  # libraries set up their work space
    modules = [network(name, device).module for _ in range(5)]

    clock = time.perf_counter if device.startswith("cuda") else time.process_time

    def timed(module: nn.Module) -> float:
        began = clock()
        explain(module, images)["gradcam"].values.sum().item()
        return (clock() - began) * 1e3

    with fixed_threads(1):
        first, later = (sorted(map(timed, modules))[2] for _ in range(2))
    what = f"first Grad-CAM of a new module, {name}, one image"
    return [cost(what, first, "second call", later)]


def kept_memory(names: Sequence[str], rounds: int) -> list[Row]:
    """An input of a pass of eight, with glibc set to keep freed memory, as in long jobs, and without.

    Each is measured in new processes, since earlier allocations change what glibc returns to the system.
    """
    result = []
    for name in names:
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
            runs = [(keeps, processes.submit(one_input, name, keeps).result())
                    for _ in range(rounds) for keeps in (True, False)]  # fmt: skip
        kept, returned = (median(ms for keeps, ms in runs if keeps == wanted) for wanted in (True, False))
        result.append(cost(f"input of {name}, freed memory kept", kept, "returned to the system", returned))
    return result


def one_input(name: str, keeps: bool) -> float:
    """Milliseconds of an input of a pass of eight in this process."""
    if keeps:
        keep_freed_memory()
    run = partial(all_logits, network(name, "cpu"), torch.randn(8, 3, 224, 224))
    return side_by_side({name: run}, 10)[name] / 8
