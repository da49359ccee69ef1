"""Two processes for test_monitor_distributed.py: distributed_training.py OUT, which forks after its imports.

Every process writes what happened to it to OUT/RANK.json. After each step of a monitor all processes add up a
number, as training adds up gradients: one that stopped alone leaves the other waiting until time is up.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import warnings
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from test_monitor_training import STOPS, blind, data
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from heatproof.errors import HeatproofError
from heatproof.monitor.watch import AlarmRaised, Monitor

EPOCHS = 3
RANK = 0  # the forked process has 1
messages: list[str] = []


class Heard(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        messages.append(record.getMessage())


def monitor(**options: Any) -> Monitor:
    images, labels = data()
    settings = {**STOPS, "batch_size": 8, "layer": "1", **options}
    return Monitor(images, labels, **settings)


def trained(watching: Monitor, net: nn.Module | None = None, checked: bool = True) -> dict[str, Any]:
    """A user's loop around a monitor; how it ended in this process."""
    wrapped = nn.parallel.DistributedDataParallel(net or blind())
    messages.clear()
    epochs, ended, reports = 0, "", []
    try:
        if checked:
            watching.check(wrapped)
        for epoch in range(1, EPOCHS + 1):
            wrapped(data()[0][RANK::2]).sum().backward()  # adds up gradients over the processes
            report = watching.step(wrapped, epoch)
            reports.append(None if report is None else [len(report.new_alarms), report.problem])
            epochs += 1
    except (AlarmRaised, HeatproofError, RuntimeError) as error:
        ended = f"{type(error).__name__}: {error}"
    alone = torch.ones(1)
    distributed.all_reduce(alone)  # both are still here, and at the same place
    return {"epochs": epochs, "ended": ended, "reports": reports, "said": list(messages), "here": int(alone),
            "known": len(watching.trajectory)}  # fmt: skip


def raises_in(rank: int) -> Any:
    def on_alarm(alarm: Any) -> None:
        if rank == RANK:
            raise RuntimeError("enough")

    return on_alarm


class Wide(nn.Module):
    """A network that the second process cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = blind()

    def forward(self, x: Tensor) -> Tensor:
        if RANK == 1:
            raise RuntimeError("out of memory, as it were")
        return self.net(x)


def plain(_: Path) -> dict[str, Any]:
    seen: list[int] = []
    result: dict[str, Any] = {
        "stop": trained(monitor()),
        "warn": trained(monitor(stop_on=())),
        "every": trained(monitor(stop_on=(), every=2)),
        "called": trained(monitor(stop_on=(), on_alarm=lambda alarm: seen.append(alarm.mechanism))),
        "raise in the first": trained(monitor(stop_on=(), on_alarm=raises_in(0))),
        "raise in the second": trained(monitor(stop_on=(), on_alarm=raises_in(1))),
        "cannot be measured": trained(monitor(layer="nowhere"), checked=False),
        "check": trained(monitor(stop_on=(), layer=None), Wide()),
    }
    return {**result, "seen": seen}


def lightning(out: Path) -> dict[str, Any]:
    import lightning.pytorch as library

    from heatproof.monitor.callbacks import LightningCallback

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = blind()

        def training_step(self, batch: Any, _index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.0)

    def epochs(watching: Monitor) -> int:
        callback = LightningCallback(watching, model=lambda module: module.net)
        trainer = library.Trainer(
            max_epochs=EPOCHS, accelerator="cpu", devices=2, strategy="ddp",
            callbacks=[callback], logger=False, default_root_dir=out, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(TensorDataset(*data()), batch_size=4))
        return int(trainer.current_epoch)

    return {"stop": epochs(monitor()), "warn": epochs(monitor(stop_on=()))}


def huggingface(out: Path) -> dict[str, Any]:
    import transformers

    from heatproof.monitor.callbacks import HuggingFaceCallback

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = blind()

        def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            logits = self.net(pixel_values)
            loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
            return {**loss, "logits": logits}

    rows = [{"pixel_values": image, "labels": label} for image, label in zip(*data(), strict=True)]

    def epochs(watching: Monitor) -> float:
        settings = transformers.TrainingArguments(
            output_dir=str(out), num_train_epochs=EPOCHS, per_device_train_batch_size=4, save_strategy="no",
            report_to=[], use_cpu=True, ddp_backend="gloo", disable_tqdm=True, learning_rate=0.0,
        )  # fmt: skip
        trainer = transformers.Trainer(
            Plain(), settings, train_dataset=rows, callbacks=[HuggingFaceCallback(watching)]
        )
        trainer.train()
        return float(trainer.state.epoch)

    return {"stop": epochs(monitor(layer="net.1")), "warn": epochs(monitor(layer="net.1", stop_on=()))}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # the libraries' advice
    torch.set_num_threads(1)
    for package in ("lightning.pytorch", "transformers.trainer"):
        if find_spec(package.partition(".")[0]):
            importlib.import_module(package)
    second = os.fork()  # both have everything imported, which takes seconds
    RANK = int(second == 0)
    os.environ |= {"RANK": str(RANK), "LOCAL_RANK": str(RANK)}
    logging.getLogger("heatproof.monitor").addHandler(Heard())
    place = Path(sys.argv[1])
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))  # the libraries take it up
    result = {
        kind.__name__: kind(place / kind.__name__)
        for kind, package in ((plain, "torch"), (lightning, "lightning"), (huggingface, "accelerate"))
        if find_spec(package)
    }
    (place / f"{RANK}.json").write_text(json.dumps(result))
    distributed.barrier()  # neither process ends while the other uses the connection
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    ended = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) if second else 0
    os._exit(abs(ended))  # at exit, threads of the libraries sometimes abort a process whose work is done
