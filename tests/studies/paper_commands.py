"""The smallest configurations of the commands on docs/papers.md for QR codes, COSE and localisation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from test_study_localise import NETWORK, make_folder

from tiny_study import make_study

QR = (
    "--size 64 --width 2 --train 16 --test 8 --proxy 0 --head-epochs 1 --epochs 1 --train-batch 16 "
    "--subset 2 --robust 2 --causal 6 --scenes 2 --edits 2 --curves all --threads 1 "
    "--device cpu --methods eigengradcam"
)
COSE = "--draws 1 --device cpu --model net.py:tiny --images pictures --checkpoints epochs/*.pt"
LOCALISE = "--model net.py:colours --images data --steps 10 --panels 2 --device cpu --threads 1"


def codes(_: Path) -> list[str]:
    return ["study", "qr", *QR.split(), "--out", "out"]


def codes_beside(
    run: Callable[[list[str], Path], object], finished: dict[Callable[[Path], list[str]], Path]
) -> Callable[[Path], list[str]]:
    """A second network beside a first study: that of `codes`, if its test ran in this process."""

    def arguments(folder: Path) -> list[str]:
        if codes not in finished:
            run(codes(folder), folder)
            finished[codes] = (folder / "out").rename(folder / "RUN")
        small = [*QR.split(), "--no-figures", "--no-depth-study", "--no-ablation"]
        return ["study", "qr", *small, "--width", "3", "--beside", str(finished[codes]), "--out", "out"]

    return arguments


def _pictures(folder: Path, *more: str) -> list[str]:
    make_study(folder, images=6)
    return ["study", "cose", *COSE.split(), "--out", "out", *more]


def one_network(folder: Path) -> list[str]:
    return _pictures(folder, "--methods", "gradcam,smoothgrad(samples=2)", "--paper")


def by_pearson(folder: Path) -> list[str]:
    return _pictures(folder, "--methods", "gradcam", "--similarity", "pearson", "--no-figures")


def beside(run: Callable[[list[str], Path], object]) -> Callable[[Path], list[str]]:
    """A second study, of another data set and pre-training, beside a first one."""

    def prepare(folder: Path) -> list[str]:
        first = _pictures(folder, "--methods", "gradcam", "--no-figures")
        run([*first[:-4], "run", *first[-3:]], folder)
        options = ["--methods", "gradcam", "--beside", "run", "--dataset", "others", "--pretraining", "dino"]
        return ["study", "cose", *COSE.split(), "--out", "out", *options]

    return prepare


def _squares(folder: Path) -> list[str]:
    (folder / "net.py").write_text(NETWORK)
    make_folder(folder / "data")
    return ["study", "localise", *LOCALISE.split(), "--out", "out"]


def as_the_thesis(folder: Path) -> list[str]:
    methods = ["--methods", "gradcam,lime(samples=30, segment_count=9)"]
    return [*_squares(folder), *methods, "--target", "label", "--layer", "last_conv"]


def further(folder: Path) -> list[str]:
    (folder / "groups.csv").write_text("class,group\nred,warm\nblue,cold\n")
    (folder / "list.txt").write_text("02.png\n")
    lists = ["--groups", "groups.csv", "--exclude", "list.txt", "--repeats", "2", "--segment-counts", "9,16"]
    lists += ["--segmentations", "slic,felzenszwalb", "--sample-counts", "20", "--cues", "cues.csv"]
    methods = ["--methods", "lime(samples=30, segment_count=9)", "--panels", "0", "--subset", "3"]
    command = [*_squares(folder), *lists, *methods]
    extra = [(f"{i:02d}.png", 0, 32, 32, 4, 4, 19, 19) for i in (9, 10)]  # a class with three right answers
    make_folder(folder / "data", extra)
    (folder / "cues.csv").write_text("path,shape,texture\ndata/images/00.png,green,red\n")
    return command
