"""The monitor in fastai and in MONAI: real trainings, the same to the last bit with and without it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from test_monitor_training import EPOCHS, STOPS, blind, data, monitor, network, same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heatproof.errors import InputError, MissingExtraError
from heatproof.monitor import callbacks
from heatproof.monitor.watch import Monitor

pytestmark = pytest.mark.trains

CROSS_ENTROPY = nn.CrossEntropyLoss()


def seeded() -> DataLoader[Any]:
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    return DataLoader(TensorDataset(*data()), batch_size=8, shuffle=True)


@pytest.mark.filterwarnings("ignore")  # of fastai's own parts
def test_fastai() -> None:
    pytest.importorskip("fastai", reason="pip install 'heatproof[fastai]' runs this test")
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader as OwnLoader
    from fastai.learner import Learner
    from fastai.optimizer import SGD, Adam

    def learner(net: nn.Module, *callbacks: Any, rate: float = 1e-2) -> Any:
        loaders = DataLoaders(seeded(), OwnLoader(TensorDataset(*data()), bs=8), device="cpu")
        options: Any = {"opt_func": Adam if rate else SGD, "lr": rate, "cbs": list(callbacks)}
        return Learner(loaders, net, loss_func=CROSS_ENTROPY, **options)

    def train(net: nn.Module, *callbacks: Any, rate: float = 1e-2) -> tuple[Any, int]:
        learn = learner(net, *callbacks, rate=rate)
        seeded()
        with learn.no_logging():
            learn.fit(EPOCHS)
        return net.state_dict(), len(learn.recorder.values)

    watching = monitor()
    watched, _ = train(network(), callbacks.FastaiCallback(watching))
    assert [c.epoch for c in watching.trajectory] == [1, 2, 3]
    assert same(watched, train(network())[0])

    with pytest.raises(InputError, match="labels do not match"):
        train(network(), callbacks.FastaiCallback(Monitor(data()[0], data()[1] + 1)))
    stopping = monitor(layer="1", **STOPS)
    _, epochs = train(blind(), callbacks.FastaiCallback(stopping), rate=0.0)
    assert epochs == 2 and len(stopping.trajectory) == 2

    looking = monitor()
    learn = learner(network(), callbacks.FastaiCallback(looking))
    with learn.no_logging():
        learn.get_preds()  # no training, and no step
    assert len(looking.trajectory) == 0


@pytest.mark.filterwarnings("ignore")  # of MONAI's and ignite's own parts
def test_monai() -> None:
    pytest.importorskip("monai", reason="pip install 'heatproof[monai]' runs this test")
    ignite = pytest.importorskip("ignite.engine", reason="pip install 'heatproof[monai]' runs this test")
    from monai.engines import SupervisedTrainer

    def train(net: nn.Module, *handlers: Any, rate: float = 1e-2) -> tuple[Any, int]:
        trainer = SupervisedTrainer(
            device=torch.device("cpu"), max_epochs=EPOCHS, train_data_loader=seeded(), network=net,
            optimizer=torch.optim.SGD(net.parameters(), rate), loss_function=CROSS_ENTROPY,
            prepare_batch=lambda batch, *_args, **_options: tuple(batch), train_handlers=list(handlers),
        )  # fmt: skip
        seeded()
        trainer.run()
        return net.state_dict(), trainer.state.epoch

    watching = monitor()
    watched, _ = train(network(), callbacks.MonaiHandler(watching))
    assert [c.epoch for c in watching.trajectory] == [1, 2, 3]
    assert same(watched, train(network())[0])
    with pytest.raises(InputError, match="labels do not match"):
        train(network(), callbacks.MonaiHandler(Monitor(data()[0], data()[1] + 1)))
    assert train(blind(), callbacks.MonaiHandler(monitor(layer="1", **STOPS)), rate=0.0)[1] == 2

    net, plain = network(), monitor()
    engine = ignite.Engine(lambda _engine, batch: net(batch[0]))
    callbacks.MonaiHandler(plain, model=lambda _: net).attach(engine)
    engine.run(seeded(), max_epochs=2)
    assert [c.epoch for c in plain.trajectory] == [1, 2]
    nameless = ignite.Engine(lambda _engine, batch: None)
    callbacks.MonaiHandler(monitor()).attach(nameless)
    with pytest.raises(InputError, match="no network of its own"):
        nameless.run(seeded(), max_epochs=1)


def test_a_library_that_is_missing_is_named_with_its_install_line(monkeypatch: Any) -> None:
    import heatproof.errors

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

    monkeypatch.setattr(heatproof.errors.importlib, "import_module", absent)
    monkeypatch.delattr(callbacks, "FastaiCallback", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'heatproof\[fastai\]'"):
        callbacks.FastaiCallback  # noqa: B018
    with pytest.raises(MissingExtraError, match=r"pip install 'heatproof\[monai\]'"):
        callbacks.MonaiHandler(monitor())
