"""Makes what docs/contrast.md shows: runs its code and its command in a folder, then draws its picture.

python docs/contrast_page.py FOLDER      some minutes on two cores; what FOLDER holds already is not repeated
"""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import chdir
from pathlib import Path

from click.testing import CliRunner
from PIL import Image

from heatproof.cli import main as command_line
from heatproof.cli._study import arguments
from heatproof.cli.study import contrast_command
from heatproof.studies.contrast.protocol import contrast_study, strip
from heatproof.studies.settings import ContrastSettings

DOCS = Path(__file__).parent
METHODS = ("gradcam", "integrated-gradients", "edges")


def main(folder: Path) -> None:
    text = (DOCS / "contrast.md").read_text(encoding="utf-8")
    setup, command = re.search(
        r"^```python no-run[^\n]*\n(.*?)^```.*?^```sh\nheatproof (.*?)^```", text, re.M | re.S
    ).groups()  # type: ignore[union-attr]
    words = shlex.split(command.replace("\\\n", " "))
    folder.mkdir(parents=True, exist_ok=True)
    with chdir(folder):
        if not Path("weights.pt").exists():
            exec(compile(setup, "contrast.md", "exec"), {})
        print(CliRunner().invoke(command_line, words).output)
        context = contrast_command.make_context("contrast", words[1:])
        options = {name: value for name, value in context.params.items() if value is not None}
        result = contrast_study(ContrastSettings(**arguments(ContrastSettings, options))).result
    strips = [strip(result, method, 2, method) for method in METHODS]
    whole = Image.new("RGB", (strips[0].width, sum(image.height for image in strips)), "white")
    top = 0
    for image in strips:
        whole.paste(image, (0, top))
        top += image.height
    whole.quantize(256).save(DOCS / "contrast.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
