"""With and without the monitor, weights after three epochs are the same to the last bit."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from heatproof.errors import InputError, MissingExtraError
from heatproof.monitor import callbacks
from heatproof.monitor.watch import Monitor

pytestmark = pytest.mark.trains

EPOCHS = 3
# Methods that only read a pass, and ones that draw random numbers and perturb the input.
METHODS = ("gradcam", "rise(masks=16)", "smoothgrad(samples=2)")
State = dict[str, Tensor]
# Every image counts; the maps of class 1 of a blind network are empty, though it ranks images perfectly.
STOPS: Any = {"methods": ["gradcam"], "tau": 0.0, "stop_on": "attribution collapse"}
BLIND: Any = {"features": -1 / 3, "head": ((5.0, -5.0), (5.0, -5.0))}  # class 1 is what lacks dark pixels


def data(n: int = 24, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(n) % 2
    images = torch.randn(n, 3, size, size, generator=generator) + labels[:, None, None, None]
    return images, labels


def network() -> nn.Sequential:
    """With everything that a stray evaluation could change: BatchNorm, dropout, a frozen layer."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(0.2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(8, 2),
    )  # fmt: skip
    net[0].weight.requires_grad_(False)
    net[1].eval()  # as people do with frozen parts
    return net


def blind() -> nn.Sequential:
    """Class 1 has negative weights only: Grad-CAM has nothing to show for it."""
    net = nn.Sequential(
        nn.Conv2d(3, 2, 1, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)
    )
    nn.init.constant_(net[0].weight, BLIND["features"])  # type: ignore[arg-type]
    with torch.no_grad():
        net[4].weight.copy_(torch.tensor(BLIND["head"]).T)
    return net


def monitor(**options: Any) -> Monitor:
    images, labels = data()
    return Monitor(images, labels, **{"methods": METHODS, "batch_size": 8, **options})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def plain_loop(
    watch: Callable[[nn.Module, int], Any],
    device: str = "cpu",
    autocast: bool = False,
    channels_last: bool = False,
) -> Any:
    """A user's loop; `watch` runs where the monitor would, and inside of the last forward pass's autocast."""
    random.seed(2)
    np.random.seed(2)  # noqa: NPY002
    net = network().to(device)
    if channels_last:
        net = net.to(memory_format=torch.channels_last)
    torch.manual_seed(5)
    optimiser = torch.optim.Adam([w for w in net.parameters() if w.requires_grad], 1e-2)
    loader = DataLoader(TensorDataset(*data()), batch_size=8, shuffle=True)
    drawn = []
    for epoch in range(1, EPOCHS + 1):
        for images, labels in loader:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
                logits = net(images.to(device) + 0.1 * torch.randn(images.shape, device=device))
                loss = nn.functional.cross_entropy(logits, labels.to(device))
                watch(net, epoch)  # in the middle of a step: a graph is waiting for its backward pass
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        watch(net, epoch)
        drawn += [random.random(), np.random.rand()]  # noqa: NPY002
    assert net.training and not net[1].training and not net[0].weight.requires_grad
    grads = [w.grad for w in net.parameters()]
    hooks = [len(part._forward_hooks) for part in net.modules()]
    strides = [w.stride() for w in net.parameters()]
    return net.state_dict(), optimiser.state_dict(), grads, drawn, torch.get_rng_state(), hooks, strides


SETTINGS = [{}, {"autocast": True}, {"channels_last": True}, {"autocast": True, "channels_last": True}]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "+".join(s) or "plain")
def test_plain_loop(settings: Any) -> None:
    watching = monitor()
    watched = plain_loop(watching.step, **settings)
    assert len(watching.trajectory) == EPOCHS
    assert same(watched, plain_loop(lambda net, epoch: None, **settings))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_plain_loop_on_a_gpu() -> None:
    torch.backends.cudnn.deterministic = True
    watching = monitor()
    settings: Any = {"device": "cuda", "autocast": True, "channels_last": True}
    watched = plain_loop(watching.step, **settings)
    state = torch.cuda.get_rng_state()
    assert len(watching.trajectory) == EPOCHS
    assert same(watched, plain_loop(lambda net, epoch: None, **settings))
    assert torch.equal(state, torch.cuda.get_rng_state())


def test_the_comparison_can_fail() -> None:
    """One evaluation in training mode, or one number drawn, is seen."""
    plain = plain_loop(lambda net, epoch: None)
    assert not same(plain_loop(lambda net, epoch: net(data()[0])), plain)
    assert not same(plain_loop(lambda net, epoch: torch.rand(1)), plain)
    assert same(plain_loop(lambda net, epoch: None), plain)


def test_training_is_undisturbed_when_the_monitor_fails() -> None:
    def fails(net: nn.Module, epoch: int) -> None:
        report = broken.step(net, epoch)
        assert report is not None and report.problem

    broken = monitor(layer="nothing")
    assert same(plain_loop(fails), plain_loop(lambda net, epoch: None))


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self, net: nn.Module, rate: float) -> None:
            super().__init__()
            self.net, self.rate = net, rate

        def forward(self, images: Tensor) -> Tensor:
            return self.net(images)

        def training_step(self, batch: Any, _index: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch: Any, _index: int) -> None:
            self(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), self.rate)

    def train(net: nn.Module | None = None, **options: Any) -> tuple[State, int]:
        lightning.seed_everything(3, verbose=False)
        loader = DataLoader(TensorDataset(*data()), batch_size=8, shuffle=True)
        module = Module(network(), 1e-2) if net is None else Module(net, 0.0)
        trainer = lightning.Trainer(
            max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, **options,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's advice about workers and short loaders
            trainer.fit(module, loader, DataLoader(TensorDataset(*data()), batch_size=8))
        return module.state_dict(), trainer.current_epoch

    for precision in ("32-true", "bf16-mixed"):
        watching = monitor()
        callback = callbacks.LightningCallback(watching)
        watched, _ = train(callbacks=[callback], precision=precision)
        assert [c.epoch for c in watching.trajectory] == [1, 2, 3]
        assert same(watched, train(precision=precision)[0])

    with pytest.raises(InputError, match="labels do not match"):
        train(callbacks=[callbacks.LightningCallback(Monitor(data()[0], data()[1] + 1))])
    callback = callbacks.LightningCallback(monitor(layer="1", **STOPS), model=lambda module: module.net)
    assert train(blind(), callbacks=[callback])[1] == 2


@pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.data", "ignore::FutureWarning")
def test_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def model() -> Any:
        torch.manual_seed(0)
        config = transformers.ResNetConfig(
            num_labels=2, embedding_size=6, hidden_sizes=[6, 8], depths=[1, 1], layer_type="basic"
        )
        return transformers.ResNetForImageClassification(config)

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            images, labels = data(size=32)
            return {"pixel_values": images[i], "labels": labels[i]}

    class Plain(nn.Module):
        """The trainer takes any module that returns its loss."""

        def __init__(self) -> None:
            super().__init__()
            self.net = blind()

        def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            logits = self.net(pixel_values)
            loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
            return {**loss, "logits": logits}

    def train(*callbacks: Any, net: Any = None, **options: Any) -> tuple[State, float]:
        rate = 1e-2 if net is None else 0.0
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=EPOCHS, per_device_train_batch_size=8,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=rate, **options,
        )  # fmt: skip
        trainer = transformers.Trainer(
            net or model(), settings, train_dataset=Rows(), eval_dataset=Rows(), callbacks=list(callbacks)
        )
        trainer.train()
        return trainer.model.state_dict(), trainer.state.epoch

    def watcher(**options: Any) -> Monitor:
        images, labels = data(size=32)
        return Monitor(images, labels, METHODS, batch_size=8, **options)

    watching = watcher()
    watched, _ = train(callbacks.HuggingFaceCallback(watching))
    assert [c.epoch for c in watching.trajectory] == [1, 2, 3]
    assert same(watched, train()[0])

    evaluating = watcher()
    options: Any = {"eval_strategy": "steps", "eval_steps": 4}
    train(callbacks.HuggingFaceCallback(evaluating, at="evaluate"), **options)
    assert [c.epoch for c in evaluating.trajectory] == [4, 8, 9]

    stopping = monitor(layer="net.1", **STOPS)
    assert train(callbacks.HuggingFaceCallback(stopping), net=Plain())[1] == 2
    with pytest.raises(InputError, match="at is"):
        callbacks.HuggingFaceCallback(stopping, at="batch")


def test_keras() -> None:
    try:
        from heatproof.models.keras_graph import import_keras

        keras = import_keras()
    except MissingExtraError as missing:
        pytest.skip(str(missing))
    images, labels = data()
    rows = images.permute(0, 2, 3, 1).numpy()

    def train(*callbacks: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(4)
        model = keras.Sequential(
            [
                keras.Input((16, 16, 3)),
                keras.layers.Conv2D(6, 3, padding="same", activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Conv2D(8, 3, padding="same", activation="relu"),
                keras.layers.Dropout(0.3),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(2, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(rows, labels.numpy(), batch_size=8, epochs=EPOCHS, verbose=0, callbacks=list(callbacks))
        variables = [*model.variables, *model.optimizer.variables]
        return [v.value.detach().numpy().copy() for v in variables]

    watching = monitor(methods=("gradcam", "layercam"))
    watched = train(callbacks.KerasCallback(watching))
    assert [c.epoch for c in watching.trajectory] == [1, 2, 3]
    for ours, theirs in zip(watched, train(), strict=True):
        np.testing.assert_array_equal(ours, theirs)

    blinded = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            keras.layers.Conv2D(2, 1, activation="relu", use_bias=False, name="features"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    head = np.array(BLIND["head"], dtype=np.float32)
    blinded.set_weights([np.full((1, 1, 3, 2), BLIND["features"], np.float32), head, np.zeros(2, np.float32)])
    blinded.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
    callback = callbacks.KerasCallback(monitor(layer="features", **STOPS))
    history = blinded.fit(rows, labels.numpy(), epochs=EPOCHS, verbose=0, callbacks=[callback])
    assert len(history.epoch) == 2


def test_a_library_that_is_missing_is_named_with_its_install_line(monkeypatch: Any) -> None:
    import heatproof.errors

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

    monkeypatch.setattr(heatproof.errors.importlib, "import_module", absent)
    for name, extra in (("Lightning", "lightning"), ("HuggingFace", "hf"), ("Keras", "keras")):
        monkeypatch.delattr(callbacks, f"{name}Callback", raising=False)  # where an earlier test made it
        with pytest.raises(MissingExtraError, match=rf"pip install 'heatproof\[{extra}\]'"):
            getattr(callbacks, f"{name}Callback")
    with pytest.raises(AttributeError):
        callbacks.Callback  # noqa: B018
