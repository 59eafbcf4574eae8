"""`livedraft config show`."""

from __future__ import annotations

import json

from livedraft.settings import Settings


def show(settings: Settings, *, as_json: bool) -> None:
    values = settings.shown()
    if as_json:
        print(json.dumps(values))
        return
    for section, entries in values.items():
        print(f"[{section}]")
        for key, value in entries.items():
            # TOML has no null: what is left to livedraft is shown as a comment.
            print(f"# {key} = (not set)" if value is None else f"{key} = {json.dumps(value)}")
        print()
