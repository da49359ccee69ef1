"""heatproof serve: the report as a live page while a run is going."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from pathlib import Path

import click

from heatproof.cli._console import say


@click.command("serve")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535), help="0: any.")
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0: all, with a token.")
@click.option("--token", is_flag=True, help="Ask for a token on loopback too.")
@click.option(
    "--open/--no-open", "open_page", default=True, show_default=False, help="Open the page in a browser."
)
def serve_command(run: Path, port: int, host: str, token: bool, open_page: bool) -> None:
    """Show the folder RUN as a live page, also while the run is going; Ctrl-C ends it.

    The report with every image: filter, sort, search, compare two methods or checkpoints with a slider, and
    download what is shown. Only this machine can open it; with another --host, only who has the token.

    \b
    Examples:
      heatproof serve runs/first
      heatproof serve runs/first --port 9000 --no-open
      heatproof serve runs/first --host 0.0.0.0
    """
    from heatproof.store import RunFolder

    RunFolder.open(run)  # before torch is imported, which takes its time
    from heatproof.report.serve import Server  # needs duckdb and msgspec

    with Server(run, host, port, token) as server:
        say(f"{server.live.path} is shown at {server.address}")
        if not server.live.state()["units"]:
            say("it has no finished unit yet; the page fills as the run goes on")
        if server.token:
            say("whoever has this address can look; keep it to yourself")
        say("Ctrl-C ends it")
        threading.Thread(target=server.live.warm, daemon=True).start()
        if open_page and _has_screen():
            threading.Thread(target=webbrowser.open, args=[server.address], daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("\nended")


def _has_screen() -> bool:
    """Without one, a browser for terminals would take this terminal over."""
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
