"""Reading weight files: what training scripts write, and what they never should have."""

import argparse
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import heatproof as hp
from heatproof.errors import CheckpointError
from heatproof.models.checkpoints import ClassCountError, fit_names, load_checkpoint, read_checkpoint


def network(classes: int = 3, width: int = 4) -> nn.Sequential:
    parts = OrderedDict(
        conv=nn.Conv2d(3, width, 3),
        bn=nn.BatchNorm2d(width),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        fc=nn.Linear(width, classes),
    )
    return nn.Sequential(parts)


def weights(**options: int) -> dict[str, Tensor]:
    torch.manual_seed(7)
    return network(**options).state_dict()


def prefixed(prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in weights().items()}


def same(module: nn.Module, expected: dict[str, Tensor], **tolerance: Any) -> bool:
    return all(torch.allclose(v, expected[k], **tolerance) for k, v in module.state_dict().items())


WRITTEN = {
    "plain": weights(),
    "state_dict": {"state_dict": weights(), "epoch": 3, "optimizer": {"lr": 0.1}},
    "model_state_dict": {"model_state_dict": weights(), "loss": torch.tensor(0.5)},
    "model": {"model": weights(), "args": argparse.Namespace(lr=0.1)},
    "net": {"net": weights()},
    "nested": {"model": {"state_dict": weights()}},
    "ema only": {"ema": {"module": weights()}, "epoch": 1},
    "ema beside": {"state_dict_ema": weights(classes=9), "state_dict": weights()},
    "module.": prefixed("module."),
    "_orig_mod.": prefixed("_orig_mod."),
    "module._orig_mod.": prefixed("module._orig_mod."),
    "lightning": {
        "state_dict": prefixed("model.") | {"loss.weight": torch.ones(2)},
        "pytorch-lightning_version": "2.4",
    },
    "backbone": prefixed("student.backbone."),
    "counters absent": {k: v for k, v in weights().items() if "num_batches" not in k},
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_usual_wrappers_are_understood(kind: str, tmp_path: Path) -> None:
    torch.save(WRITTEN[kind], tmp_path / "best.ckpt")
    module = network()
    load_checkpoint(module, tmp_path / "best.ckpt")
    assert same(module, weights())


@pytest.mark.parametrize("name", ["best.safetensors", "best.bin"])
def test_safetensors_are_known_by_their_content(name: str, tmp_path: Path) -> None:
    safetensors.torch.save_file(prefixed("module."), tmp_path / name)
    module = network()
    load_checkpoint(module, str(tmp_path / name))
    assert same(module, weights())


def test_half_precision_weights_load_into_a_full_precision_model(tmp_path: Path) -> None:
    torch.save(
        {k: v.half() if v.is_floating_point() else v for k, v in weights().items()}, tmp_path / "half.pt"
    )
    module = network()
    load_checkpoint(module, tmp_path / "half.pt")
    assert module.fc.weight.dtype == torch.float32 and same(module, weights(), atol=1e-3)


def test_the_old_torch_format_loads(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    module = network()
    load_checkpoint(module, tmp_path / "old.pth")
    assert same(module, weights())


@given(prefix=st.lists(st.sampled_from(["module", "model", "net", "a.b", "fc", "conv"]), max_size=4))
def test_any_prefix_is_taken_off(prefix: list[str]) -> None:
    front = "".join(part + "." for part in prefix)
    assert fit_names(prefixed(front), weights()).keys() == weights().keys()


def broken_files(folder: Path) -> dict[str, bytes]:
    torch.save(weights(), folder / "whole.pt")
    safetensors.torch.save_file(weights(), folder / "whole.safetensors")
    return {
        "text.pt": b"epoch,loss\n1,0.5\n" * 20,
        "noise.pt": bytes(range(256)) * 8,
        "picture.pt": b"\x89PNG\r\n\x1a\n" + bytes(200),
        "cut.pt": (folder / "whole.pt").read_bytes()[:700],
        "cut.safetensors": (folder / "whole.safetensors").read_bytes()[:300],
        "list.pickle": pickle.dumps([1, 2, 3], protocol=2),
    }


@pytest.mark.parametrize(
    "name", ["text.pt", "noise.pt", "picture.pt", "cut.pt", "cut.safetensors", "list.pickle"]
)
def test_a_file_that_is_no_checkpoint_raises_a_clear_error(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(broken_files(tmp_path)[name])
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_missing_empty_and_folder_are_distinguished(tmp_path: Path) -> None:
    (tmp_path / "empty.pt").touch()
    for path, word in (("none.pt", "no such"), ("empty.pt", "empty"), (".", "folder")):
        with pytest.raises(CheckpointError, match=word):
            read_checkpoint(tmp_path / path)


def test_a_file_without_weights_names_what_it_holds(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "optimizer": {}}, tmp_path / "log.pt")
    with pytest.raises(CheckpointError, match=r"no weights but a dict \(epoch, optimizer\)"):
        read_checkpoint(tmp_path / "log.pt")


def test_a_pickled_module_needs_the_flag(tmp_path: Path) -> None:
    torch.manual_seed(7)
    torch.save(network(), tmp_path / "module.pt")
    with pytest.raises(CheckpointError, match=r"Sequential.*allow_pickle = true.*--allow-pickle"):
        read_checkpoint(tmp_path / "module.pt")
    module = network()
    load_checkpoint(module, tmp_path / "module.pt", allow_pickle=True)
    assert same(module, weights())


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_reading_runs_no_code(tmp_path: Path) -> None:
    torch.save({"state_dict": Trap(tmp_path / "sprung")}, tmp_path / "trap.pt")
    with pytest.raises(CheckpointError, match="mkdir"):
        read_checkpoint(tmp_path / "trap.pt")
    assert not (tmp_path / "sprung").exists()


def test_a_misfit_names_the_first_few_weights_and_how_many(tmp_path: Path) -> None:
    other = {k.replace("bn.", "norm."): v for k, v in weights().items()} | {
        "conv.weight": torch.zeros(4, 1, 3, 3)
    }
    torch.save(other, tmp_path / "other.pt")
    module = network()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(module, tmp_path / "other.pt", name="small net")
    message = str(caught.value)
    assert "does not fit small net: 4 missing (bn.weight, bn.bias, bn.running_mean, ...)" in message
    assert "5 unexpected (norm.weight, norm.bias, norm.running_mean, ...)" in message
    assert "1 of another shape (conv.weight is 4x1x3x3, not 4x3x3x3)" in message
    assert same(module, before), "a file that does not fit must not be loaded in part"


def test_another_number_of_classes_is_distinguished_from_another_model(tmp_path: Path) -> None:
    torch.save(weights(classes=5), tmp_path / "five.pt")
    with pytest.raises(ClassCountError, match="has 5 classes but Sequential was made with 3") as caught:
        load_checkpoint(network(), tmp_path / "five.pt")
    assert caught.value.classes == 5
    torch.save(weights(width=6), tmp_path / "wide.pt")
    with pytest.raises(CheckpointError, match="of another shape") as other:
        load_checkpoint(network(), tmp_path / "wide.pt")
    assert not isinstance(other.value, ClassCountError)


def test_a_new_head_keeps_its_own_values(tmp_path: Path) -> None:
    torch.save(weights(classes=5), tmp_path / "five.pt")
    module = network()
    head = module.fc.weight.clone()
    load_checkpoint(module, tmp_path / "five.pt", new_head=True)
    assert torch.equal(module.fc.weight, head) and torch.equal(module.conv.weight, weights()["conv.weight"])  # type: ignore[arg-type]


def test_a_file_of_two_networks_needs_a_prefix(tmp_path: Path) -> None:
    other = {name: tensor + 1 for name, tensor in weights().items()}
    both = prefixed("student.") | {f"teacher.{name}": tensor for name, tensor in other.items()}
    torch.save(both, tmp_path / "both.pt")
    with pytest.raises(CheckpointError, match=r"several networks, student\. and teacher\.; .*prefix = 'stud"):
        load_checkpoint(network(), tmp_path / "both.pt")
    module = hp.load_model(network(), tmp_path / "both.pt", prefix="teacher.").module
    assert same(module, other)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    stored = weights() | {"fc.weight": (weights()["fc.weight"] * 100).to(torch.int8)}
    torch.save(stored, tmp_path / "int8.pt")
    with pytest.raises(CheckpointError, match=r"integers \(torch\.int8\) for fc\.weight, a quantised weight"):
        load_checkpoint(network(), tmp_path / "int8.pt")


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices are files on Unix")
def test_pipes_and_devices_are_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "zero.pt").symlink_to("/dev/zero")
    code = """
import sys
from heatproof.errors import CheckpointError
from heatproof.models.checkpoints import read_checkpoint
for path in sys.argv[1:]:
    try:
        read_checkpoint(path)
    except CheckpointError as error:
        print(error)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "pipe.pt"), str(tmp_path / "zero.pt")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    sentences = process.stdout.splitlines()
    assert len(sentences) == 2, process.stderr
    assert all("is a pipe or a device, not a file; name a weight file" in line for line in sentences)
