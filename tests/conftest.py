"""What tests share: small networks with random weights, and a counter of passes."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import settings
from torch import nn

from heatproof.report import figures
from heatproof.store import manifest

DATA = Path(__file__).parent / "data"
FORMATS = figures.FORMATS
SOURCE = Path(__file__).parents[1] / "src"
REAL_DATA = Path(__file__).parents[2] / "shared" / "data"

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

settings.register_profile("any machine", deadline=None)  # a limit of 200 ms fails on a busy one
settings.load_profile("any machine")
# What tests write need not outlive a power cut, and each wait costs milliseconds.
os.fsync = lambda fd: None
os.environ.pop("COLUMNS", None)  # of the terminal that tests are started from; tables are as in a pipe
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in its background so
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    # torch.manual_seed stores a formatted stack trace for each kind of GPU that may be initialised later.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None


class Doctests:
    """Those of the package: only the files that have some are imported to look for them."""

    @staticmethod
    def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> DoctestModule | None:
        ours = file_path.suffix == ".py" and file_path.is_relative_to(SOURCE)
        if ours and ">>> " in file_path.read_text(encoding="utf-8"):
            return DoctestModule.from_parent(parent, path=file_path)
        return None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Doctests(), "doctests of the package")


def pytest_collection_finish() -> None:
    """Exempt what imports made from garbage collection, which took a quarter of the time of all tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries report what is left when Python ends


@pytest.fixture(autouse=True)
def repeatable() -> None:
    """Every test draws the same numbers each time, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def one_environment() -> Iterator[None]:
    """Versions of packages are read once and the git state once per folder, 65 ms of a run; figures are PNG.

    The other formats take two thirds of a figure's time.
    """
    versions, state = cache(manifest.package_versions), cache(manifest.git_state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "package_versions", lambda: dict(versions()))
        patch.setattr(manifest, "git_state", lambda folder: copy(state(folder)))
        patch.setattr(figures, "FORMATS", ("png",))
        yield


@pytest.fixture
def every_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures as outside of tests: SVG, PDF and PNG."""
    monkeypatch.setattr(figures, "FORMATS", FORMATS)


@pytest.fixture(scope="module")
def short_studies() -> Iterator[None]:
    """20 resamples behind correlations without size, passes timed for 10 ms."""
    from heatproof.studies.qr import results

    resample = results.resample
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heatproof.studies.qr.protocol.SECONDS", 0.01)
        few = lambda n, count=1000, seed=0: resample(n, 20 if count == 200 else count, seed)  # noqa: E731
        patch.setattr(results, "resample", few)
        yield


@pytest.fixture(scope="session")
def papers() -> dict[str, Any]:
    """The published tables and the hand-computed vectors."""
    return json.loads((DATA / "papers.json").read_text())


@pytest.fixture(scope="session")
def real_data() -> Path:
    if not REAL_DATA.is_dir():
        pytest.skip("the real data folder is not here; these tests run where it lies beside the project")
    return REAL_DATA


@dataclass
class Passes:
    """Forward passes a module made, with the size of each batch, and backward passes through it."""

    batches: list[int] = field(default_factory=list)
    backward: int = 0

    @property
    def forward(self) -> int:
        return len(self.batches)


@contextmanager
def counting(module: nn.Module) -> Iterator[Passes]:
    passes = Passes()

    def seen(_module: nn.Module, args: tuple[Any, ...], _output: Any) -> None:
        passes.batches.append(len(args[0]))

    handle = module.register_forward_hook(seen)
    original = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> Any:
        passes.backward += 1
        return original(*args, **kwargs)

    torch.autograd.grad = grad
    try:
        yield passes
    finally:
        handle.remove()
        torch.autograd.grad = original


def small_cnn(classes: int = 5, channels: int = 3, seed: int = 0) -> nn.Sequential:
    """Three convolutions, 32x32 in, 8x8 at the last one."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, classes),
    )  # fmt: skip


def small_vit(classes: int = 5, seed: int = 0) -> nn.Module:
    """Two blocks over 4x4 tokens and a class token, 16x16 in."""
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(seed)
    net = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=2, num_classes=classes
    )
    return randomise(net)


@pytest.fixture
def cnn() -> nn.Sequential:
    return small_cnn().eval()


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def state_of(module: nn.Module) -> dict[str, object]:
    """Everything about a module that an explanation must leave as it was."""
    parts = dict(module.named_modules())
    return {
        "weights": {k: v.clone() for k, v in module.state_dict().items()},
        "modes": {n: p.training for n, p in parts.items()},
        "flags": {n: w.requires_grad for n, w in module.named_parameters()},
        "gradients": {n: w.grad is None for n, w in module.named_parameters()},
        "strides": {n: w.stride() for n, w in module.named_parameters()},
        "hooks": {n: [len(getattr(p, hooks)) for hooks in HOOKS] for n, p in parts.items()},
        "random": torch.get_rng_state(),
    }


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give parameters that start as zeros or ones (heads, layer scales, norms) values that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() > 1 and parameter.std() < 1e-4:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


Build = Callable[[], nn.Module]
