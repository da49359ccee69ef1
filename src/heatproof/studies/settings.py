"""Settings of the studies: each is declared once, as a field of its settings class.

    size: int = option(64, "Pixels along a side.", least=16)

The command line makes an option (--size) and a key of its TOML file (size = 64) of it (cli/_study.py); values
out of range are refused, wherever they come from. Nothing here imports torch, so that help is fast; settings
of audits are in audit/settings.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from heatproof.errors import InputError, did_you_mean
from heatproof.registry import check_methods, explainers, split_calls
from heatproof.train.recipe import CHECKPOINTS, SCHEDULES

HEAD = (
    "What the output is: softmax, logit, multilabel, regression, segmentation, detection or embedding. "
    "Detected automatically if unambiguous."
)
PROMPT = 'For CLIP and other image-text models: a class, "class: text" or a text; several times.'
PROMPTS = "The same from a text file, one per line."
CLASS_HEAD = "What the output is: softmax, logit, probabilities. Detected automatically if unambiguous."
LAYER = "Layer of CAMs; chosen automatically by default."
LIMIT = "Maximum number of images, classes in proportion."
DEVICE = "cpu, cuda, cuda:1, ...; default: a GPU if available."
EXPECT_ACCURACY = "Expected accuracy; stop if the measured one is far off."
THREADS = "Threads of torch; default: OMP_NUM_THREADS or one per CPU."
CHANNELS = "mean and std are one number per channel, such as 0.5,0.5,0.5"
KEY = "option"


@dataclass(frozen=True)
class Option:
    """Help text and allowed values of a setting."""

    help: str
    short: str = ""  # a letter: "m" for -m
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None  # parses the text of an option with several values
    default_text: str | None = None  # shown in the help instead of the default
    both: bool = False  # also add --no-NAME to a switch that is off by default, since a preset may turn it on


def option(default: Any = MISSING, /, help: str = "", **facts: Any) -> Any:
    """A field that can be set from the command line; without a default it is required."""
    return field(default=default, metadata={KEY: Option(help, **facts)})


class Settings:
    """The base of settings classes; raises InputError for values out of range and unknown methods."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value, about = getattr(self, each.name), each.metadata.get(KEY)
            if about is None or value is None:
                continue
            name = each.name.replace("_", "-")
            if about.least is not None and value < about.least:
                raise InputError(f"{name} is at least {about.least}; got {value}")
            if about.most is not None and value > about.most:
                raise InputError(f"{name} is at most {about.most}; got {value}")
            if about.choices and value not in about.choices:
                raise InputError(f"{name} cannot be {value!r}; {did_you_mean(value, about.choices)}")
        check_methods(getattr(self, "methods", ()))


def calls(text: str) -> tuple[str, ...]:
    """Names with options: "gradcam,lime(samples=9, seed=1)"."""
    return tuple(split_calls(text))


def words(text: str) -> tuple[str, ...]:
    """Texts between commas.

    >>> words("a, b c,")
    ('a', 'b c')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())


def pixels(text: str) -> tuple[int, ...]:
    """Parse one or more sizes.

    >>> pixels("128"), pixels("96,128")
    ((128,), (96, 128))
    """
    try:
        sides = tuple(map(int, words(text)))
    except ValueError:
        sides = ()
    if not sides or len(sides) > 3 or min(sides) < 1:
        raise InputError(
            f"sizes are whole numbers of pixels, such as 128 or 96,128 (height,width); got {text!r}"
        )
    return sides


def numbers(text: str, rule: str = CHANNELS, kind: type = float) -> tuple[Any, ...]:
    """Parse numbers between commas; rule: what they must be, for the error.

    >>> numbers("0.5, 0.25"), numbers("1,5", kind=int)
    ((0.5, 0.25), (1, 5))
    """
    try:
        return tuple(map(kind, words(text)))
    except ValueError:
        raise InputError(f"{rule}; got {text!r}") from None


whole_numbers = partial(numbers, rule="the numbers are whole, such as 1,5,10", kind=int)


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings(Settings):
    """Parts of the preprocessing that replace the network's own: the [preprocess] table of a study."""

    size: tuple[int, ...] = option(
        (), "Input size of the network in pixels: 128, or height,width.", read=pixels, default_text=""
    )
    resize: tuple[int, ...] = option(
        (), "Shorter side before the centre crop, or exact height,width; --size by default.",
        read=pixels, default_text="",
    )  # fmt: skip
    mean: tuple[float, ...] = option((), "Mean of each channel, to subtract.", read=numbers, default_text="")
    std: tuple[float, ...] = option((), "Standard deviation of each channel.", read=numbers, default_text="")

    @property
    def table(self) -> dict[str, Any]:
        """Keys and values of the settings that are set."""
        size = self.size * 2 if len(self.size) == 1 else self.size
        resize = self.resize or (size[:1] if len(set(size)) == 1 and len(size) == 2 else size)
        keys: dict[str, Any] = {"size": list(size), "resize": resize[0] if len(resize) == 1 else list(resize)}
        keys |= {"mean": list(self.mean), "std": list(self.std)}
        return {key: value for key, value in keys.items() if value}


CSCORE_METHODS = ("gradcam", "gradcam++", "layercam", "eigencam", "scorecam(channels=32)", "ms-gradcam++")
RAW_FORMS = {"ms-gradcam++": "ms-gradcam++(scaled=false)"}  # eq. 7 of the paper


def _tau(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # refused below, unless it is "adaptive"


def read_window(text: str) -> tuple[float, ...] | str:
    return text if text == "range" else numbers(text, "window is centre,width, such as 40,400, or range")


@dataclass(frozen=True, kw_only=True)
class CscoreSettings(Settings):
    """Settings of a C-Score study. Numbers of the training are the paper's."""

    images: tuple[Path, ...] = option(
        (), "Folder with a folder per class; may be repeated, then all are pooled.", short="i"
    )
    kind: str = option(
        "folder", "How the images are listed; nifti and arrays may be volumes (CT, MRI), also in a CSV.",
        choices=("folder", "csv", "nifti", "arrays"),
    )  # fmt: skip
    axes: str | None = option(None, "Axes of each array, for --kind arrays: dhw, cdhw, ...")
    size: tuple[int, ...] = option(
        (), "Input size of volumes, if it is not the network's own: depth,height,width.",
        read=pixels, default_text="",
    )  # fmt: skip
    window: tuple[float, ...] | str = option(
        (), "Values of scans mapped to 0 to 1: centre,width, or range: each scan's own.",
        read=read_window, default_text="",
    )  # fmt: skip
    model: str = option(
        "lite0", "lite0, torchvision:NAME, timm:NAME, keras:NAME, FILE.py:FACTORY, ...", short="M"
    )
    networks: tuple[str, ...] = option(
        (), "Several networks, in the form of --model, processed in turn and compared on one page."
    )
    beside: tuple[Path, ...] = option((), "A finished study, on the same page; may be repeated.")
    checkpoints: tuple[str, ...] = option(
        (), "Existing weights, or a pattern; skips the training. May be repeated.", short="c"
    )
    pretrained: bool = option(False, "Begin with the library's own weights.")
    methods: tuple[str, ...] = option(
        CSCORE_METHODS, "Comma-separated; the paper's six by default.", short="m", read=calls, default_text=""
    )
    paper: bool = option(
        False,
        "As printed: ms-gradcam++ averages raw maps (eq. 7). By default each layer's map is scaled to [0, 1] "
        "first, since layers differ in size and one of them would decide.",
    )  # fmt: skip
    held_out: float = option(0.2, "Share of images held out from training.")
    head_epochs: int = option(20, "Epochs of phase 1.", least=0)
    full_epochs: int = option(10, "Epochs of phase 2.", least=0)
    head_lr: float = option(1e-4, "Learning rate of phase 1.")
    full_lr: float = option(1e-5, "Learning rate of phase 2.")
    label_smoothing: float = option(0.1, "Label smoothing in phase 2.")
    clip: float = option(1.0, "Maximum gradient norm in phase 2.")
    train_batch: int = option(32, "Images per step of training.", least=1)
    first_phase: str = option(
        "head", "What phase 1 trains; all: for a backbone without pretrained weights.",
        choices=("head", "all"),
    )  # fmt: skip
    class_weights: bool = option(False, "Weigh classes by their inverse frequency.")
    transforms: bool = option(False, "Train with COSE's transforms, chosen at random.")
    keep: tuple[int, ...] = option(CHECKPOINTS, "Epochs to score.", read=whole_numbers)
    tau: float | str = option(
        0.5, "Gold lists: least probability of an image; or adaptive.",
        read=_tau, default_text="0.5",
    )  # fmt: skip
    weights: str = option(
        "confidence", "Weight of an image: its probability, that calibrated on the other half, or 1.",
        choices=("confidence", "calibrated", "uniform"),
    )  # fmt: skip
    anchor: str | None = option(
        None, "Checkpoint whose gold lists are used for all: first, last, or its name, such as epoch20."
    )
    gradients: bool = option(False, "Log each layer's gradients, and test whether they predict alarms.")
    layer: str | None = option(None, LAYER, short="l")
    head: str | None = option(None, CLASS_HEAD)
    sweep: bool = option(True, "Also compute the C-Score of every CAM at every depth.")
    limit: int | None = option(None, LIMIT, least=1)
    out: Path = option(Path("runs/cscore"), "Folder.", short="o")
    batch_size: int = option(32, "Images per unit of the run.", least=1)
    device: str | None = option(None, DEVICE)
    threads: int | None = option(None, THREADS, least=1)
    amp: bool = option(False, "Train in bfloat16.")
    seed: int = option(0, "Seed of all random numbers.")
    seeds: tuple[int, ...] = option(
        (), "Several trainings on one page, with the same images held out, for tests over seeds: 0,1,2.",
        read=whole_numbers, default_text="",
    )  # fmt: skip

    def __post_init__(self) -> None:
        from heatproof.metrics.classifier import ListRule

        super().__post_init__()
        ListRule(self.tau, self.weights)  # type: ignore[arg-type]  # refuses what is neither
        if len(self.size) not in (0, 3):
            raise InputError(f"size is depth,height,width of volumes; got {','.join(map(str, self.size))}")
        if self.seeds and self.checkpoints:
            raise InputError(
                "seeds are of trainings, and existing checkpoints are not trained; leave one out"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise InputError(f"seeds must differ; got {','.join(map(str, self.seeds))}")
        for name in ("checkpoints", "layer"):
            if len(self.networks) > 1 and getattr(self, name):
                raise InputError(
                    f"{name} belong to one network; make a study of each, then one page: "
                    "heatproof study cscore RUN RUN"
                )

    @property
    def last_epoch(self) -> int:
        return self.head_epochs + self.full_epochs

    @property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """Networks and seeds to train."""
        none = self.beside and not (self.networks or self.seeds)
        networks = () if none else self.networks or (self.model,)
        return tuple((spec, seed) for spec in networks for seed in self.seeds or (self.seed,))

    @property
    def preprocess(self) -> dict[str, Any]:
        """Parts of the preprocessing that replace the network's own."""
        window = self.window if isinstance(self.window, str) else list(self.window)
        return {key: value for key, value in {"size": list(self.size), "window": window}.items() if value}

    @property
    def split_seed(self) -> int:
        """Decides which images are held out, the same for all seeds."""
        return (*self.seeds, self.seed)[0]

    @property
    def explained(self) -> tuple[str, ...]:
        """The methods, in the paper's form if that is chosen."""
        return tuple(RAW_FORMS.get(method, method) for method in self.methods) if self.paper else self.methods


SIMILARITIES = {
    "local5": "SSIM", "eq2": "SSIM (eq. 2)", "pearson": "Pearson's r", "spearman": "Spearman's rho",
}  # fmt: skip
COSE_METHODS = (
    "blur-ig", "gradcam", "gradcam++", "guided-ig", "integrated-gradients", "lime", "smoothgrad",
)  # fmt: skip


def _cose_methods(text: str) -> tuple[str, ...]:
    if text == "all":
        return tuple(entry.name for entry in explainers if not entry.architecture)  # those for any network
    return COSE_METHODS if text == "paper" else calls(text)


@dataclass(frozen=True, kw_only=True)
class CoseSettings(Settings):
    """Settings of a COSE study."""

    model: str = option(help="torchvision:NAME, timm:NAME, hf:FOLDER, FILE.py:FACTORY, lite0, ...", short="M")
    images: str | Path = option(help="Path of the images.")
    kind: str = option("folder", "folder, csv, imagenet, npz, hf or dicom.")
    checkpoints: tuple[str | Path, ...] = option(
        (), "Weight files of one training run, or a quoted pattern; may be given several times."
    )
    final: str | None = option(None, "Name of the trained checkpoint; the last one by default.")
    random_init: bool = option(True, "Also the untrained network.")
    pretrained: bool = option(False, "The library's weights are the final model.")
    methods: tuple[str, ...] = option(
        COSE_METHODS, '"paper" (the seven of the paper), "all", or names: "gradcam,lime(samples=200)".',
        short="m", read=_cose_methods, default_text="paper",
    )  # fmt: skip
    paper: bool = option(
        False,
        "As the authors ran it: integrated gradients in 25 steps from zero in normalised space (their code; "
        "the text has a black image); LIME as the signs of ten quickshift segments, 1,000 random samples, "
        "hidden segments 0; squared SmoothGrad; gradients of the probability, except CAMs; only images that "
        "the final model classifies correctly.",
    )
    similarity: str = option(
        "local5",
        "SSIM in windows (the authors' code), over the whole map (eq. 2 of the paper), Pearson's r (its "
        "supplement) or Spearman's rho (as its related work, section 2.2).",
        choices=tuple(SIMILARITIES),
    )
    transforms: tuple[str, ...] = option(
        (), "Some of the thirteen, comma-separated; all by default.", read=words, default_text=""
    )
    draws: int = option(6, "Magnitudes per image and signed transform.", least=1, most=60)
    limit: int | None = option(None, LIMIT, least=1)
    num_classes: int | None = option(None, "Number of classes of a network built by name.", least=1)
    class_names: tuple[str, ...] = option(
        (), "Comma-separated, in the order of the model's classes (folder, imagenet).", read=words
    )
    label_columns: tuple[str, ...] = option(
        (), "Multi-label images of a CSV file: its columns of 0 and 1, comma-separated.", read=words
    )
    layer: str | None = option(None, LAYER, short="l")
    head: str | None = option(None, HEAD)
    name: str | None = option(None, "The model's name in tables.")
    dataset: str | None = option(None, "The images' name in tables; that of their folder by default.")
    pretraining: str | None = option(
        None, "How the network was pre-trained (supervised, dino, ...), to group studies by."
    )
    trained_with: str = option(
        "unknown",
        "Whether these transforms were part of the training; detected for trainings of heatproof.",
        choices=("yes", "no", "unknown"),
    )
    beside: tuple[Path, ...] = option((), "Folder of another COSE study, for the same Table 1.")
    figures: bool = option(True, "Draw the figures.")
    examples: int = option(2, "Images whose maps are shown before and after a change.", least=0)
    same_seed: bool = option(False, "Both sides of a pair draw the same random numbers.")
    require_correct: bool = option(False, "Only images that the final model classifies correctly.")
    allow_pickle: bool = option(False, "Allow checkpoints to run code. Only if you trust them.")
    out: Path = option(Path("runs/cose"), "Folder.", short="o")
    batch_size: int | None = option(None, "Inputs per pass; chosen automatically by default.", least=1)
    unit_images: int = option(8, "Images per unit, the most that an interruption loses.", least=1)
    device: str | None = option(None, DEVICE)
    threads: int | None = option(None, "Threads of torch; default: OMP_NUM_THREADS or automatic.", least=1)
    seed: int = option(0, "Seed of all random numbers.", least=0)


QR_FLOORS = ("random", "edges")
QR_LIGHT = ("gradcam", "gradcam++", "layercam", "xgradcam", "hirescam", "eigencam", "eigengradcam")
QR_MAIN = "eigengradcam"  # what the paper's Tables 5 and 6 and its Figure 4 show
QR_HEAVY = ("ms-gradcam++", "gradient", "smoothgrad", "integrated-gradients", "scorecam", "lime")


@dataclass(frozen=True, kw_only=True)
class QrSettings(Settings):
    """Settings of a QR study.

    The defaults are the small configuration: a network of a few layers at 64 pixels, for minutes on a CPU.
    QR_FULL is the paper's size. The recipes are ours: the paper mentions short schedules but no rate, no
    number of epochs and no batch size.
    """

    model: str = option("small", "small, lite0, torchvision:NAME, timm:NAME, FILE.py:FACTORY.", short="M")
    pretrained: bool = option(False, "Begin with the library's own weights; else a proxy task.")
    symbol: str = option("qr", "What is drawn: qr, datamatrix, aztec, barcode.")
    photos: Path | None = option(None, "A folder of photographs for backgrounds.")
    size: int = option(64, "Pixels along a side.")
    width: int = option(8, "Channels of the small network's first stage.", least=1)
    train: int = option(200, "Codes to train on, and as many negatives.", least=8)
    test: int = option(100, "Codes to test on, and as many negatives.", least=4)
    proxy: int = option(900, "Images of the proxy task; 0: use the backbone unchanged.", least=0)
    proxy_epochs: int = option(10, "Epochs of the proxy task.", least=1)
    proxy_lr: float = option(3e-3, "Learning rate of the proxy task.")
    head_epochs: int = option(10, "Epochs of ZS.", least=1)
    head_lr: float = option(1e-2, "Learning rate of ZS.")
    epochs: int = option(8, "Epochs of every other training.", least=1)
    lr: float = option(1e-3, "Learning rate of every other training.")
    schedule: str = option("cosine", "Schedule of the learning rate.", choices=SCHEDULES)
    train_batch: int = option(32, "Images per step of training.", least=2)
    lam: float = option(0.25, "FT-LeakMin's weight of leakage, lambda.")
    alpha: float = option(0.25, "FT-LeakMin's weight of mass inside the code.")
    surrogate: str = option(
        "gradcam", "The map that FT-LeakMin penalises.", choices=("gradcam", "hirescam", "layercam")
    )
    methods: tuple[str, ...] = option(
        QR_LIGHT, 'Scored on every code: "gradcam,layercam".', short="m", read=calls, default_text="the CAMs"
    )
    heavy: tuple[str, ...] = option(
        (),
        'Scored on the subset only: "lime,rise(masks=500)"; all: all others.',
        read=calls,
        default_text="none",
    )
    subset: int = option(24, "Codes for insertion, deletion and --heavy.", least=2)
    curves: str = option(
        "subset", "Codes for insertion and deletion of --methods; all with --full.", choices=("subset", "all")
    )
    robust: int = option(32, "Codes that are distorted.", least=2)
    causal: int = option(100, "Codes whose parts are occluded.", least=3)
    scenes: int = option(24, "Images with two codes and a distractor.", least=0)
    edits: int = option(24, "Codes one finder of which is removed, moved and swapped.", least=0)
    depth_study: bool = option(True, "Table 5 and Figure 4.")
    ablation: bool = option(True, "Table 6.")
    figures: bool = option(True, "Draw the figures.")
    layer: str | None = option(None, LAYER, short="l")
    head: str | None = option(None, CLASS_HEAD)
    batch_size: int = option(50, "Codes per unit of a run.", least=1)
    device: str | None = option(None, DEVICE)
    threads: int | None = option(None, THREADS, least=1)
    amp: bool = option(False, "Train in bfloat16; on with --full.", both=True)
    seed: int = option(0, "Seed of all random numbers.", least=0)
    seeds: int = option(1, "Number of repetitions on the same data, for intervals over seeds.", least=1)
    out: Path = option(Path("runs/qr"), "Folder.", short="o")
    beside: tuple[Path, ...] = option((), "Folder of a QR study of another network, for the same page.")

    @property
    def every_method(self) -> tuple[str, ...]:
        """The light ones with the floors, as they are scored on all codes."""
        from heatproof.studies.common import with_floors  # imports torch: not for a list of options

        return with_floors(self.methods, QR_FLOORS)

    @property
    def real(self) -> tuple[str, ...]:
        """The light methods that read the network."""
        from heatproof.explain.baselines import is_floor

        return tuple(method for method in self.methods if not is_floor(method))

    @property
    def listed(self) -> tuple[str, ...]:
        """As the tables list them: light, heavy, floors."""
        floors = (method for method in self.every_method if method not in self.real)
        return (*self.real, *self.heavy, *floors)

    @property
    def light(self) -> tuple[str, ...]:
        """Those that are scored on every code, floors last."""
        return tuple(method for method in self.listed if method not in self.heavy)

    @property
    def detailed(self) -> tuple[str, ...]:
        """Of the depth study and the ablation: the paper's method, and the one that the penalty is about."""
        main = QR_MAIN if QR_MAIN in self.real else self.real[0]
        return tuple(dict.fromkeys(method for method in (main, "gradcam") if method in self.real))


QR_FULL: dict[str, Any] = {
    "model": "torchvision:resnet50", "size": 224, "train": 600, "test": 300,
    "proxy": 2400, "proxy_epochs": 20, "proxy_lr": 1e-3, "head_lr": 1e-3,
    "epochs": 10, "lr": 1e-4, "schedule": "constant", "amp": True,
    "heavy": QR_HEAVY, "subset": 32, "curves": "all", "scenes": 100, "edits": 100, "robust": 100,
    "causal": 200, "batch_size": 128,
}  # fmt: skip


BASELINES = ("blur", "black", "mean", "noise")  # explain/baselines.py
LOCALISE_FLOORS = ("random", "edges", "centre")  # always beside the methods
PREPROCESS: dict[str, dict[str, Any]] = {
    "own": {},
    "thesis": {"size": [224, 224], "resize": [256, 256]},
    "shorter-side": {"size": [224, 224], "resize": 256},
}


@dataclass(frozen=True, kw_only=True)
class FlagThresholds(Settings):
    """Thresholds of the flags; their rules are in tables.toml."""

    low_insertion: float = option(0.3, "Flag: unfaithful below.")
    high_insertion: float = option(0.6, "Flag: faithful from here.")
    off_object: float = option(0.5, "Flag: off-object below this share of what fits into the box.")
    confident: float = option(0.5, "Flag: confident above.")
    rise: float = option(0.1, "Flag: a deletion curve that rises by this.")
    overlap: float | None = option(None, "Flag: methods disagree up to here; the budget by default.")


@dataclass(frozen=True, kw_only=True)
class LocaliseSettings(Settings):
    """Settings of a localisation study."""

    model: str = option(help="lite0, torchvision:NAME, timm:NAME, hf:FOLDER, FILE.py:FACTORY, ...", short="M")
    checkpoint: Path | None = option(None, "Weights: safetensors or torch.")
    images: Path = option(help="Folder or CSV file of images with boxes.")
    kind: str = option("imagenet", "How the images are listed.", choices=("imagenet", "csv"))
    class_names: tuple[str, ...] = option(
        (), "Comma-separated, in the order of the model's classes; else its own.", read=words
    )
    methods: tuple[str, ...] = option(
        ("gradcam", "lime"), 'Comma-separated, options in brackets: "gradcam,lime(samples=200)".',
        short="m", read=calls,
    )  # fmt: skip
    budget: float = option(0.2, "Share of pixels that a map may mark.")
    target: str = option(
        "predicted",
        "Class to explain: the predicted one, as the text of the thesis describes it, or the true one, which "
        "its printed means fit.",
        choices=("predicted", "label"),
    )
    preprocess: str = option(
        "own",
        "The model's own; or, with its normalisation, stretched to 256 x 256 and cropped to 224 (thesis), or "
        "the shorter side resized to 256 and cropped.",
        choices=tuple(PREPROCESS),
    )
    exclude: str | None = option(
        None,
        "Left out: ambiguous (ImageNet's labels that mean the same), or a file, a class or image a line.",
    )
    groups: str | None = option(
        None,
        "Tables for groups of classes: imagenet, wordnet (the thesis's twelve subtrees), or a CSV file with "
        "the columns class and group.",
    )
    box_share: tuple[float, float] = option(
        (0.1, 0.8), "Least and largest share of the image that its box covers."
    )
    limit: int | None = option(None, LIMIT, least=1)
    panels: int = option(12, "Case studies to draw, and as many confused images.", least=0)
    repeats: int = option(0, "Repetitions with other seeds on a subset, to test stability.", least=0)
    segment_counts: tuple[int, ...] = option(
        (), "LIME with other numbers of segments: 30,100,200,300.", read=whole_numbers, default_text="none"
    )
    segmentations: tuple[str, ...] = option(
        (), "LIME with other segmentations: slic,quickshift,felzenszwalb.", read=words, default_text="none"
    )
    sample_counts: tuple[int, ...] = option(
        (), "LIME with other numbers of samples: 100,300,1000.", read=whole_numbers, default_text="none"
    )
    cues: Path | None = option(
        None,
        "CSV file of images with conflicting cues: path, shape, texture (stylised images), or path and shape "
        "(silhouettes); a class or a group of --groups each. Measures shape bias.",
    )
    subset: int = option(12, "Images for repeats and variants of LIME.", least=1)
    steps: int = option(100, "Steps of insertion and deletion.", least=1)
    baseline: str = option("blur", "Replacement of deleted pixels.", choices=BASELINES)
    layer: str | None = option(None, f"{LAYER} last_conv: as the thesis.", short="l")
    head: str | None = option(None, CLASS_HEAD)
    thresholds: FlagThresholds = field(default_factory=FlagThresholds)
    out: Path = option(Path("runs/localise"), "Folder.", short="o")
    batch_size: int = option(16, "Images per unit.", least=1)
    device: str | None = option(None, DEVICE)
    threads: int | None = option(None, THREADS, least=1)
    seed: int = option(0, "Seed of all random numbers.")


SHARES = "strength is one share or several, such as 1,0.8,0.5,0.2"
CONTRAST_METHODS = ("gradcam", "gradcam++", "layercam", "hirescam", "eigencam", "integrated-gradients")


@dataclass(frozen=True, kw_only=True)
class ContrastSettings(Settings):
    """Settings of a contrast study."""

    model: str = option(help="lite0, torchvision:NAME, timm:NAME, hf:FOLDER, FILE.py:FACTORY, ...", short="M")
    checkpoint: Path | None = option(None, "Weights: safetensors or torch.")
    images: Path = option(help="Folder with a folder of images for each class.")
    class_names: tuple[str, ...] = option(
        (), "Comma-separated, in the order of the model's classes; else its own.", read=words
    )
    limit: int | None = option(None, LIMIT, least=1)
    token: str = option("tag", "What is planted: tag, tint, blur, texture, or an image file.")
    token_size: float | None = option(None, "Size of the token, as a share of the image's side.")
    positive: str | None = option(
        None, "The class that gets the token, by name or number; by default the largest."
    )
    strength: tuple[float, ...] = option(
        (1.0,),
        "Share of its images that get the token; several make a curve: 1,0.8,0.5,0.2.",
        read=partial(numbers, rule=SHARES),
    )
    methods: tuple[str, ...] = option(
        CONTRAST_METHODS,
        'Comma-separated, options in brackets: "gradcam,lime(samples=200)".',
        short="m",
        read=calls,
    )
    epochs: int = option(40, "Maximum epochs of each training.", least=1)
    lr: float = option(3e-4, "Learning rate of the first epoch.")
    layer: str | None = option(None, LAYER, short="l")
    head: str | None = option(None, CLASS_HEAD)
    preprocess: PreprocessSettings = field(default_factory=PreprocessSettings)
    allow_pickle: bool = option(False, "Allow the checkpoint to run code. Only if you trust it.")
    device: str | None = option(None, DEVICE)
    seed: int = option(0, "Seed of all random numbers.", least=0)
    out: Path = option(Path("runs/contrast"), "Folder.", short="o")
