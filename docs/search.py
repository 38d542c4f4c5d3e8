"""Search of the built site where no server is."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_post_build(config: Any) -> None:
    """Write the index of the search as a script: pages that are opened without a server cannot read JSON."""
    search = Path(config.site_dir) / "search"
    (search / "search_index.js").write_text(f"var __index = {(search / 'search_index.json').read_text()}")
