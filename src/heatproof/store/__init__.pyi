from .folder import RunFolder, Status
from .manifest import Change, Manifest, compare_configs
from .maps import MapStore
from .scores import Scores

__all__ = ["Change", "Manifest", "MapStore", "RunFolder", "Scores", "Status", "compare_configs"]
