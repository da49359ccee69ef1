"""Networks as people have them: compiled, parallel, sharded, quantised, exported, checkpointed, halved."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import heatproof as hp
from heatproof.errors import ModelError
from heatproof.models.running import is_quantised, unwrapped
from heatproof.registry import explainers

INSIDE = ("gradcam", "eigencam", "gradient", "ablationcam", "lrp", "integrated-gradients(steps=3)")
ANSWERS = ("occlusion(window=8, stride=4)", "lime(samples=30)", "rise(masks=8, grid=3)")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A group of one process, on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def same_as_plain(wrapped: nn.Module, images: Tensor, methods: tuple[str, ...], atol: float) -> None:
    plain = hp.explain(network(), images, methods, targets=0)
    maps = hp.explain(wrapped, images, methods, targets=0)
    for method in methods:
        torch.testing.assert_close(maps[method].upsample(), plain[method].upsample(), rtol=0, atol=atol)


def compiled_part() -> nn.Module:
    net = network()
    net[4] = torch.compile(net[4], backend="eager")  # type: ignore[assignment]
    return net


def compiled_in_place() -> nn.Module:
    net = network()
    net.compile(backend="eager")
    return net


WRAPPERS: dict[str, Callable[[], Any]] = {
    "compiled": lambda: torch.compile(network(), backend="eager"),
    "compiled part": compiled_part,
    "compiled in place": compiled_in_place,
    "DataParallel": lambda: nn.DataParallel(network()),
    "compiled DataParallel": lambda: torch.compile(nn.DataParallel(network()), backend="eager"),
    "DataParallel of a compiled one": lambda: nn.DataParallel(torch.compile(network(), backend="eager")),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_is_wrapped_is_explained_as_if_it_were_not(kind: str, images: Tensor) -> None:
    same_as_plain(WRAPPERS[kind](), images, INSIDE + ANSWERS, 1e-6)


def test_a_compiled_part_is_not_compiled_to_be_explained(images: Tensor) -> None:
    """Hooks and changed functions would make it compile again and again."""
    calls = []

    def backend(graph: nn.Module, _inputs: object) -> nn.Module:
        calls.append(graph)
        return graph

    net = network()
    net[4] = torch.compile(net[4], backend=backend)  # type: ignore[assignment]
    hp.explain(net, images, INSIDE)
    assert not calls
    with torch.no_grad():
        net(images)
    assert len(calls) == 1  # and is, when its owner runs it


def test_distributed_data_parallel(images: Tensor, alone: None) -> None:
    same_as_plain(nn.parallel.DistributedDataParallel(network()), images, INSIDE, 1e-6)


def test_sharded_wrappers_of_one_process_work(images: Tensor, alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = network()
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    same_as_plain(net, images, ("gradcam", "gradient"), 1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of FSDP itself
def test_fsdp_says_what_to_give_instead(alone: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with pytest.raises(
        ModelError, match=r"is sharded \(FSDP\).*load it into the plain network, and give that$"
    ):
        hp.load_model(FullyShardedDataParallel(network(), device_id=torch.device("cpu")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_a_cpu(dtype: torch.dtype, images: Tensor) -> None:
    plain = hp.explain(network(), images, INSIDE, targets=0)
    maps = hp.explain(network().to(dtype), images, INSIDE + ANSWERS, targets=0)
    assert all(
        method_maps.values.dtype == torch.float32 and method_maps.values.isfinite().all()
        for method_maps in maps.values()
    )
    for method in INSIDE:  # a pixel may tip over a kink, a map may not
        both = torch.stack([either[method].upsample().flatten() for either in (plain, maps)])
        assert torch.corrcoef(both)[0, 1] > 0.97, method


def dynamic() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(network(), {nn.Linear}, dtype=torch.qint8)


def static() -> nn.Module:
    from torch.ao import quantization

    net = nn.Sequential(quantization.QuantStub(), network(), quantization.DeQuantStub()).eval()
    net.qconfig = quantization.get_default_qconfig("fbgemm")
    prepared = quantization.prepare(net)
    prepared(torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(2)))
    return quantization.convert(prepared)


@pytest.mark.parametrize("make", [dynamic, static])
def test_quantised_networks_answer_and_the_rest_is_reported(
    make: Callable[[], nn.Module], images: Tensor
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao says that torchao will take its place
        net = make()
    assert is_quantised(net) and not is_quantised(network())
    maps = hp.explain(net, images, ANSWERS)
    assert all(method_maps.values.isfinite().all() for method_maps in maps.values())
    for entry in explainers:
        if not entry.forward_only:
            with pytest.raises(
                ModelError, match=f"is quantised, and no gradient that {entry.name.replace('+', '.')} "
            ):
                hp.explain(net, images, entry.name)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        net = network()
        self.first, self.second, self.head = net[:4], net[4:6], net[6:]
        self.reentrant = reentrant

    def forward(self, images: Tensor) -> Tensor:
        for part in (self.first, self.second):
            images = checkpoint(part, images, use_reentrant=self.reentrant)
        scores: Tensor = self.head(images)
        return scores


def test_gradient_checkpointing(images: Tensor) -> None:
    same_as_plain(Checkpointed(False).eval(), images, ("gradcam", "layercam", "gradient", *ANSWERS), 1e-6)


@pytest.mark.parametrize(
    ("reentrant", "method"), [(True, "gradcam"), (True, "gradient"), (True, "lrp"), (False, "lrp")]
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints_that_give_no_gradients_are_reported(
    reentrant: bool, method: str, images: Tensor
) -> None:
    with pytest.raises(ModelError, match=r"[Ss]witch (checkpointing|that) off"):
        hp.explain(Checkpointed(reentrant).eval(), images, method)


def test_a_hugging_face_network_that_checkpoints() -> None:
    transformers = pytest.importorskip("transformers", reason="install heatproof[hf]")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=16,
        patch_size=4, num_labels=3,
    )  # fmt: skip
    torch.manual_seed(0)
    net = transformers.ViTForImageClassification(config).train()
    inputs = torch.rand(1, 3, 16, 16)
    before = hp.explain(net, inputs, ["gradcam", "gradient"], targets=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # older versions have only these names
        net.gradient_checkpointing_enable()
        assert net.is_gradient_checkpointing
    after = hp.explain(net, inputs, ["gradcam", "gradient"], targets=0)
    assert net.training
    for method in before:
        assert torch.equal(before[method].values, after[method].values)


def test_torch_export_says_what_to_give_instead(images: Tensor) -> None:
    exported = torch.export.export(network(), (images,)).module()
    with pytest.raises(ModelError, match=r"comes from torch.export.*give the nn.Module it was made from$"):
        hp.load_model(exported)
    hp.explain(torch.fx.symbolic_trace(network()), images, "gradcam")  # a graph of modules is a network


def test_wrappers_come_off_in_any_order() -> None:
    net = network()
    assert unwrapped(nn.DataParallel(torch.compile(nn.DataParallel(net), backend="eager"))) is net  # type: ignore[type-var]


def test_a_batch_that_memory_does_not_hold_is_halved(images: Tensor) -> None:
    class Small(nn.Module):
        """A network whose memory holds three images."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = network(), []

        def forward(self, inputs: Tensor) -> Tensor:
            if len(inputs) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.seen.append(len(inputs))
            scores: Tensor = self.net(inputs)
            return scores

    net = Small()
    many = images.repeat(5, 1, 1, 1)
    maps = hp.explain(net, many, ["gradcam", "gradient"], batch_size=10)
    plain = hp.explain(network(), many, ["gradcam", "gradient"])
    assert max(net.seen) == 3
    for method, method_maps in maps.items():
        torch.testing.assert_close(method_maps.values, plain[method].values, rtol=1e-5, atol=1e-6)
