"""The folders are the path of the data, and imports only go back along it."""

from __future__ import annotations

import ast
from pathlib import Path

import heatproof

ROOT = Path(heatproof.__file__).parent
COMMON = {"disk", "types", "moved", "registry", "errors", "show"}
PATH = [
    "images", "models", "explain", "metrics", "train", "store", "run", "contrast", "verdict", "monitor",
    "report", "studies",
]  # fmt: skip
ENDS = {"bench", "cli", "demo", "surface", "__init__", "__main__"}  # may use everything


def imports(file: Path) -> set[str]:
    """Rooms that a file imports, other than for type hints."""
    tree = ast.parse(file.read_text())
    hints = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in hints:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("heatproof"):
            if node.module == "heatproof":
                names |= {alias.name for alias in node.names}
            else:
                names.add(node.module.split(".")[1])
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("heatproof.")}
    return names


def test_a_room_imports_only_from_rooms_to_its_left() -> None:
    for file in ROOT.rglob("*.py"):
        room = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if room in ENDS:
            continue
        allowed = COMMON | {room}
        if room in PATH:
            allowed |= set(PATH[: PATH.index(room)])
        wrong = imports(file) - allowed
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


def test_every_room_is_on_the_path() -> None:
    rooms = {p.relative_to(ROOT).parts[0].removesuffix(".py") for p in ROOT.rglob("*.py")}
    assert rooms <= COMMON | set(PATH) | ENDS


def test_files_stay_small() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in ROOT.rglob("*.py")
        if (n := len(p.read_text().splitlines())) > 400
    }
    assert not long
