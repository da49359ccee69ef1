"""Where results live: a run folder with scores, maps and a manifest, safe to stop at any moment."""

from typing import TYPE_CHECKING

from heatproof.lazy import names_are_late

if TYPE_CHECKING:
    from heatproof.store.folder import RunFolder
    from heatproof.store.manifest import Change, Manifest, compare_configs
    from heatproof.store.maps import MapStore
    from heatproof.store.scores import Scores
    from heatproof.store.status import Status

__all__ = ["Change", "Manifest", "MapStore", "RunFolder", "Scores", "Status", "compare_configs"]

names_are_late(__name__)
