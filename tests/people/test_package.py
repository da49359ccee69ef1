"""What pip installs: a wheel built from the sdist, where nothing but the core's dependencies is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from PIL import Image

import heatproof

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = ROOT / "src" / "heatproof"
MEGABYTE = 2**20


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def needed(name: str, extras: frozenset[str] = frozenset(), seen: set[str] | None = None) -> set[str]:
    """A distribution and all that it requires, as far as they are installed."""
    seen = set() if seen is None else seen
    try:
        required = distribution(name).requires or []
    except PackageNotFoundError:
        return seen
    seen.add(re.sub(r"[-_.]+", "-", name).lower())
    for requirement in map(Requirement, required):
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in (extras or {""})
        )
        if applies and re.sub(r"[-_.]+", "-", requirement.name).lower() not in seen:
            needed(requirement.name, frozenset(requirement.extras), seen)
    return seen


@pytest.fixture(scope="module")
def light(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel, and links to what the core needs, and nothing else."""
    folder = tmp_path_factory.mktemp("light")
    venv.create(folder, with_pip=False)
    (place,) = folder.glob("lib/python*/site-packages")
    for name in needed("heatproof") - {"heatproof"}:
        installed = distribution(name)
        for top in {
            file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            if not (place / top).exists():
                (place / top).symlink_to(Path(str(installed.locate_file(top))))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    done = subprocess.run([*pip, str(built[1])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def called(light: Path, folder: Path, *command: str) -> str:
    """What a command of that environment prints; nothing of this project's folder is on its path."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "COLUMNS"))}
    done = subprocess.run(
        [str(light / command[0]), *command[1:]], cwd=folder, env=clean | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_the_package_and_no_other(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    files = {
        file.relative_to(SOURCE.parent).as_posix()
        for file in SOURCE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == files
    wanted = (
        "py.typed",
        "store/__init__.pyi",
        "references.bib",
        "verdict/rates.json",
        "report/templates/report.html",
    )
    assert {f"heatproof/{name}" for name in wanted} <= names
    assert built[1].stat().st_size < 2 * MEGABYTE
    large = {name: size for name in files if (size := (SOURCE.parent / name).stat().st_size) > MEGABYTE / 2}
    assert not large


def test_the_sdist_is_small_and_holds_no_junk(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    files = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    rest = {name for name in inside if not name.startswith("src/heatproof/")}
    assert files <= rest <= files | {".gitignore"}
    assert not [name for name in inside if "__pycache__" in name or name.endswith(".pyc")]
    assert built[0].stat().st_size < 2 * MEGABYTE


def test_the_dockerfile_copies_what_the_package_needs(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Docker is not needed: the COPY steps are executed, and the folder gives the same wheel as the sdist."""
    steps = [line.split() for line in (ROOT / "Dockerfile").read_text().splitlines()]
    context = tmp_path / "src"
    for _, *sources, target in (step for step in steps if step[:1] == ["COPY"]):
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target.strip("/"))
            else:
                (tmp_path / target.strip("/")).mkdir(exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / target.strip("/"))
    assert ["RUN", "pip", "install", "--no-cache-dir", "/src"] in steps
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--wheel",
        "--outdir",
        str(tmp_path),
        str(context),
    ]
    subprocess.run(command, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert zipfile.ZipFile(wheel).namelist() == zipfile.ZipFile(built[1]).namelist()


def test_heatproof_works_where_only_its_core_is_installed(light: Path, tmp_path: Path) -> None:
    assert (
        called(light, tmp_path, "heatproof", "--version").strip()
        == f"heatproof, version {heatproof.__version__}"
    )
    assert "gradcam" in called(light, tmp_path, "heatproof", "list", "methods")
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "parts = nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)\n"
        "def tiny(): return nn.Sequential(*parts)\n"
    )
    Image.new("RGB", (40, 40), "red").save(tmp_path / "red.png")
    command = ("explain", "net.py:tiny", "red.png", "--methods", "gradcam", "--out", "maps")
    assert "red" in called(light, tmp_path, "heatproof", *command)
    assert list((tmp_path / "maps").rglob("*.png"))


def test_the_core_is_light() -> None:
    heavy = {"ray", "mlflow", "wandb", "keras", "lightning", "captum", "pandas", "pyarrow", "transformers"}
    packages = needed("heatproof")
    assert {"torch", "numpy", "duckdb"} <= packages and not packages & (heavy | {"torchvision", "matplotlib"})


def test_the_demo_needs_the_core_alone(light: Path, tmp_path: Path) -> None:
    """The smallest demo there is, through all its stages, from the wheel."""
    code = """
import sys
from functools import partial
from pathlib import Path
import heatproof
from heatproof import demo
from heatproof.demo import Sizes, networks
networks.contrast = partial(networks.contrast, epochs=2)  # of 40; it learns no tag
sizes = Sizes(train=8, test=4, pixels=40, width=2, first_epochs=2, second_epochs=1, keep=(1, 2, 3), steps=2,
              lime="lime(samples=8, segment_count=4)", depths=1, twin=20, cose_images=4)
made = demo.run(Path("demo"), sizes)
print(heatproof.__file__, made.report)
for package in ("torchvision", "pandas", "matplotlib", "timm", "pytest"):
    assert package not in sys.modules
"""
    (tmp_path / "code.py").write_text(code)
    where, page = called(light, tmp_path, "python", "code.py").split()
    assert Path(where).is_relative_to(light.parent) and (tmp_path / page).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("target", "there", "installs"),
    [
        ("demo", [], ["venv .venv", "--editable ."]),
        ("demo", ["bin/python", ".light"], []),
        ("test", ["bin/python", ".light"], ['--editable ".[dev]"']),
        ("test", [], ["venv .venv", '--editable ".[dev]"']),
        ("demo", ["bin/python", ".light", ".ready"], []),
        ("test", ["bin/python", ".light", ".ready"], []),
    ],
)
def test_make_installs_what_is_missing_and_no_more(
    target: str, there: list[str], installs: list[str], tmp_path: Path
) -> None:
    if not (make := shutil.which("make")):
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in there:
        (tmp_path / ".venv" / name).touch()
    done = subprocess.run([make, "-n", target], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "-m venv" in line or "pip install" in line]
    assert len(lines) == len(installs) and all(map(str.endswith, lines, installs))
    assert ("touch .venv/.light" in done.stdout) == bool(installs)  # so that the other target knows


def test_the_extras_are_one_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", (ROOT / "docs" / "install.md").read_text(), re.M)
    extras = PROJECT["optional-dependencies"]
    listed = {name: packages.split(", ") for name, _, packages in rows}
    assert list(listed) == list(extras)
    for name, packages in listed.items():
        if name != "dev":
            assert packages == [Requirement(line).name for line in extras[name]]
    everything = next(Requirement(line) for line in extras["dev"] if line.startswith("heatproof["))
    assert everything.extras == set(extras) - {"dev"}
    core = re.search(r"The core installs (.+?)\.", (ROOT / "docs" / "install.md").read_text(), re.S)
    assert core and re.split(r",\s|\sand\s", core[1]) == [
        Requirement(line).name for line in PROJECT["dependencies"]
    ]
