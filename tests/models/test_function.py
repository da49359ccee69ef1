"""Networks that are only a function: what needs answers alone works as ever, the rest is refused."""

from __future__ import annotations

import io
import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import heatproof as hp
from conftest import counting, small_cnn
from heatproof.cli import main
from heatproof.errors import InputError, ModelError
from heatproof.images import Preprocess
from heatproof.models.model import all_logits
from heatproof.models.running import is_function
from heatproof.registry import explainers
from tiny_study import make_study, write_study

READY = Preprocess(size=(32, 32), resize=32)
METHODS = [
    "occlusion(window=8, stride=8)", "rise(masks=40)", "lime(samples=30, segment_count=9)",
    "kernel-shap(samples=30, segment_count=9)", "random", "edges", "centre",
]  # fmt: skip


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def as_function(net: nn.Module):
    """As a server would have it: arrays in, arrays out, and nothing else is known."""

    def predict(pictures: np.ndarray) -> np.ndarray:
        assert (
            isinstance(pictures, np.ndarray)
            and pictures.dtype == np.float32
            and pictures.flags["C_CONTIGUOUS"]
        )
        with torch.no_grad():
            return net(torch.from_numpy(pictures)).numpy()

    return predict


def test_a_function_answers_as_the_network_behind_it() -> None:
    net = small_cnn().eval()
    model = hp.load_model(as_function(net), preprocess=READY, classes=list("abcde"))
    assert model.name == "predict" and model.preprocess is READY and is_function(model.module)
    torch.testing.assert_close(model.logits(images()), hp.load_model(net).logits(images()))
    assert model.head_meaning == hp.load_model(net).head_meaning or model.head_meaning.startswith("logits")


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_need_answers_alone_give_the_same_maps_from_the_same_passes(method: str) -> None:
    net = small_cnn().eval()
    own, other = hp.load_model(net, preprocess=READY), hp.load_model(as_function(net), preprocess=READY)
    with counting(net) as passes:
        ours = hp.explain(own, images(), [method], [1, 3], batch_size=16)[method]
    with counting(other.module) as theirs:
        maps = hp.explain(other, images(), [method], [1, 3], batch_size=16)[method]
    torch.testing.assert_close(maps.values, ours.values, atol=1e-5, rtol=1e-4)
    # A network is looked into once, to fold its batch norms, where many passes follow; a function never is.
    assert 0 <= sum(passes.batches) - sum(theirs.batches) <= 2 and theirs.forward > 0


def test_a_function_may_take_tensors_and_return_what_it_likes() -> None:
    net = small_cnn().eval()
    wanted = net(images()).detach()
    for function in (
        net.forward,
        lambda x: net(x).tolist(),
        lambda x: [net(torch.as_tensor(x)).detach().numpy()],
        lambda x: net(torch.as_tensor(x)).detach().double(),
    ):
        torch.testing.assert_close(hp.load_model(function).logits(images()), wanted, check_dtype=False)
    chances = hp.load_model(lambda x: net(torch.as_tensor(x)).softmax(1).detach().numpy())
    torch.testing.assert_close(chances.logits(images()).softmax(1), wanted.softmax(1))
    assert chances.head_name == "probabilities"


def test_a_function_that_writes_to_its_input_changes_nothing() -> None:
    def rude(pictures: np.ndarray) -> np.ndarray:
        pictures[:] = 0
        return np.ones((len(pictures), 2), np.float32)

    given = images()
    hp.load_model(rude).logits(given)
    assert torch.equal(given, images())


@pytest.mark.parametrize("method", [entry.name for entry in explainers if not entry.forward_only])
def test_methods_that_look_inside_are_refused_with_those_that_work(method: str) -> None:
    model = hp.load_model(as_function(small_cnn().eval()))
    with pytest.raises(
        ModelError, match=rf"that {method.replace('+', '.')} could read; use .*kernel-shap.*rise"
    ):
        hp.explain(model, images(), [method])


def test_a_package_that_only_asks_works_too() -> None:
    pytest.importorskip("captum")
    net = small_cnn().eval()
    call = "captum:Occlusion(sliding_window_shapes=(3, 16, 16), strides=(3, 16, 16))"
    ours, theirs = (hp.explain(m, images(), call, 1)[call].values for m in (as_function(net), net))
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ModelError, match="captum:Saliency could read"):
        hp.explain(as_function(net), images(), "captum:Saliency")


def test_what_no_function_can_be_raises_a_clear_error() -> None:
    with pytest.raises(ModelError, match="returned str, not a table of scores"):
        hp.load_model(lambda x: "cat").logits(images())
    with pytest.raises(ModelError, match="for 2 images"):
        hp.load_model(lambda x: np.ones((3, 4))).logits(images())
    with pytest.raises(InputError, match="a function or a name, not int"):
        hp.load_model(3)


# --- ONNX Runtime -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session():
    """The small network in ONNX Runtime; skipped where that is not installed."""
    onnxruntime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    del onnx
    net, file = small_cnn().eval(), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = {"x": {0: "b"}, "y": {0: "b"}}
        torch.onnx.export(
            net, (images(),), file, input_names=["x"], output_names=["y"], dynamic_axes=axes, dynamo=False
        )
    return net, onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])


def test_onnx_runtime_answers_as_the_network_it_was_exported_from(session) -> None:
    net, runtime = session
    model = hp.load_model(lambda x: runtime.run(None, {"x": x}), preprocess=READY)
    many = images(40)
    torch.testing.assert_close(
        all_logits(model, many), all_logits(hp.load_model(net), many), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("method", METHODS[:4])
def test_onnx_runtime_gets_the_maps_of_the_network_it_was_exported_from(session, method: str) -> None:
    net, runtime = session
    model = hp.load_model(lambda x: runtime.run(None, {"x": x})[0], preprocess=READY)
    theirs = hp.explain(model, images(), [method], seed=2)[method].values
    ours = hp.explain(hp.load_model(net, preprocess=READY), images(), [method], seed=2)[method].values
    assert float((theirs - ours).abs().max()) < 1e-4 and ours.std() > 0


# --- in a run ---------------------------------------------------------------------------------------------

SERVED = """
import numpy as np
from net import tiny

network = tiny().module.eval()

def predict(images):
    import torch
    assert isinstance(images, np.ndarray)
    with torch.no_grad():
        return network(torch.from_numpy(images)).numpy()

def made():
    return predict
"""
METRICS = ["cscore", "accuracy", "insertion(steps=4)", "deletion(steps=4)", "fragility(draws=1)"]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    make_study(folder, images=6, methods=["occlusion(window=8, stride=8)", "random"], metrics=METRICS)
    (folder / "served.py").write_text(SERVED)
    return folder


def write(folder: Path, spec: str, methods: list[str], metrics: list[str]) -> Path:
    path = write_study(folder, methods, metrics, [], extra="[preprocess]\nsize = [32, 32]\nresize = 32\n")
    path.write_text(path.read_text().replace("net.py:tiny", spec))
    return path


@pytest.mark.parametrize("name", ["predict", "made"])
def test_a_run_of_a_function_has_the_rows_of_the_network_behind_it(study: Path, name: str) -> None:
    methods = ["occlusion(window=8, stride=8)", "random"]
    tables = []
    for spec in ("net.py:tiny", f"served.py:{name}"):
        out = study / f"run {spec} for {name}"
        run = hp.run(write(study, spec, methods, METRICS), out)
        rows = run.folder.scores().sql("select image, label, method, metric, value from scores order by all")
        tables.append({(r["image"], r["label"], r["method"], r["metric"]): r["value"] for r in rows})
        assert run.report().exists()
    assert tables[0].keys() == tables[1].keys() and len(tables[0]) > 100
    for key, value in tables[0].items():
        assert tables[1][key] == pytest.approx(value, abs=1e-4, nan_ok=True), key


def test_a_run_refuses_what_needs_more_than_answers_before_any_work(study: Path) -> None:
    for methods, metrics, words in (
        (["gradcam"], ["insertion"], r"methods: served.py:predict is a function, .* gradcam could read; use"),
        (["random"], ["randomisation"], r"metrics: randomisation needs the network's weights or gradients"),
    ):
        with pytest.raises((InputError, ModelError), match=words):
            hp.run(write(study, "served.py:predict", methods, metrics), study / "never")
    assert not (study / "never").exists()


def test_the_command_line_takes_a_function(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(study)
    (study / "sized.py").write_text(
        "import served, heatproof as hp\nfrom heatproof.images import Preprocess\n"
        "def made():\n"
        "    return hp.load_model(served.predict, preprocess=Preprocess(size=(32, 32), resize=32))\n"
    )
    command = [
        "explain",
        "sized.py:made",
        "pictures/cat/000.png",
        "-m",
        "occlusion(window=16, stride=16)",
        "-o",
        "m",
    ]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0 and len(list((study / "m").glob("*.png"))) == 2, result.output
    refused = CliRunner().invoke(main, [*command[:4], "gradcam"])
    assert refused.exit_code == 2 and "is a function, without layers or gradients" in refused.output


def test_an_audit_of_a_function_says_what_to_do_instead(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(study)
    result = CliRunner().invoke(main, ["audit", "served.py:predict", "pictures", "--out", "audited"])
    assert result.exit_code == 2 and "is a function without weights" in result.output.replace("\n", " ")


def test_a_single_output_between_0_and_1_needs_an_explicit_head() -> None:
    def chance(pictures: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-pictures.mean((1, 2, 3))))

    with pytest.raises(
        ModelError, match="a probability or a logit; set head='one probability' or head='logit'"
    ):
        hp.load_model(chance).logits(images())
    logits = images().mean((1, 2, 3))[:, None]
    torch.testing.assert_close(hp.load_model(chance, head="one probability").logits(images()), logits)
    assert hp.load_model(chance, head="logit").logits(images()).min() > 0
    findings = hp.load_model(lambda x: 1 / (1 + np.exp(-x.mean((2, 3)))), head="multilabel")
    torch.testing.assert_close(findings.logits(images()), images().mean((2, 3)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its exporter
def test_the_example_runs(tmp_path: Path, session) -> None:
    pytest.importorskip("captum")
    example = Path(__file__).parents[2] / "examples" / "bring_your_own.py"
    scores = runpy.run_path(str(example))["main"](["--out", str(tmp_path)])
    assert scores[f"files:{tmp_path / 'maps.npz'}"] == scores["gradcam"] and scores["rise"] < 1e-4
