"""The evidence album on a page: what the network uses for each class, in strips of crops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from heatproof.report.pieces import Piece, Section
from heatproof.show import address
from heatproof.verdict.album import Album, ClassPages, CropGroup

TITLE = "What the network uses"
NO_ALBUM = "no album was made of this run; heatproof verdict RUN --album makes one"


@dataclass(frozen=True)
class CropStrip(Piece):
    """Crops that are alike to the network, with what painting them over does."""

    group: CropGroup

    @property
    def pictures(self) -> list[tuple[str, str]]:
        """The id and the address of each crop."""
        return [(crop.id, address(Image.fromarray(crop.pixels))) for crop in self.group.crops]


@dataclass(frozen=True)
class AlbumClass(Piece):
    """The strips of one class."""

    pages: ClassPages

    @property
    def strips(self) -> Sequence[CropStrip]:
        return [CropStrip(group) for group in self.pages.groups]

    @property
    def left_out(self) -> str:
        """What the strips do not show, in one sentence; nothing where they show everything."""
        kept = sum(group.n for group in self.pages.groups)
        counts = {
            f"{self.pages.n - kept} in {self.pages.others} smaller groups": self.pages.others,
            f"{self.pages.blank} whose maps mark nothing": self.pages.blank,
            f"{self.pages.called_otherwise} that the network calls otherwise": self.pages.called_otherwise,
        }
        told = [text for text, count in counts.items() if count]
        return f"Pictures that are not shown: {', '.join(told)}." if told else ""


def album_section(album: Album | None) -> Section:
    """The section of an album, or why there is none."""
    if album is None:
        return Section("album", TITLE, missing=NO_ALBUM)
    if not any(pages.groups for pages in album.classes):
        return Section("album", TITLE, missing="no map marks anything in a picture of its own class")
    return Section("album", TITLE, {"album": album, "classes": [AlbumClass(p) for p in album.classes]})
