"""`livedraft config show` and `config reference`."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import MISSING, fields
from typing import Any, get_args

from livedraft.config import LOSSES, DistillConfig, DistillRunConfig, RouteKind, VllmConfig
from livedraft.settings import OTHER_VARIABLES, SECTIONS, Settings

_HEAD = """# Configuration

Made from the code by `make reference`; do not edit it here.

A server's settings come from a TOML file (`--config FILE`, or `LIVEDRAFT_CONFIG`), the environment and flags, later ones
winning:

```toml
[server]
port = 9000          # in the environment LIVEDRAFT_SERVER__PORT=9000, as a flag --port 9000
```

`livedraft config show` prints what a server started here would use, in the file's form. A name that is not below is an error
that says what was probably meant. Where a meaning says None, the setting is left out. From Python the same settings are the
fields of the dataclasses in `livedraft.config`.
"""
_CHOICES = {"Loss": LOSSES, "RouteKind": get_args(RouteKind)}
_QUOTES = "'\""
_ABOUT = {
    "model": "What is served, and where its drafts and traces are kept.",
    "engine": "Batching and memory.",
    "speculation": "What is proposed, and how much of it.",
    "learning": "The training process and the traces it learns from.",
    "routing": "Several drafts: which requests get one of their own (`docs/routes.md`). A rule is a table `[[routing.rules]]` "
    "with `route` and at least one of `api_key`, `language` and `system_prompt_contains`; all that is given must hold.",
    "server": "HTTP: addresses, keys, limits.",
    "vllm": "`livedraft vllm serve` only (`docs/vllm.md`, which also says which of the tables above it heeds).",
    "run": "`livedraft distill` only: what it works on.",
    "distill": "`livedraft distill` only: how it trains.",
}


def show(settings: Settings, *, as_json: bool) -> None:
    values = settings.shown()
    if as_json:
        print(json.dumps(values))
        return
    for section, entries in values.items():
        print(f"[{section}]")
        tables = {key: value for key, value in entries.items() if value and isinstance(value, (list, tuple))}
        tables = {key: value for key, value in tables.items() if isinstance(value[0], dict)}
        for key, value in entries.items():
            if key not in tables:
                _show_value(key, value)
        for key, rows in tables.items():
            for row in rows:
                print(f"\n[[{section}.{key}]]")
                for name, value in row.items():
                    _show_value(name, value)
        print()


def _show_value(key: str, value: Any) -> None:
    """TOML has no null: what is left to livedraft is shown as a comment."""
    print(f"# {key} = (not set)" if value is None else f"{key} = {json.dumps(value)}")


def reference() -> str:
    """Every setting as Markdown, made of the dataclasses' own fields and docstrings."""
    parts = [_HEAD]
    for section, kind in SECTIONS.items():
        parts.append(f"## [{section}]\n\n{_ABOUT[section]}\n\n{_table(kind)}")
    parts.append(f"## [vllm]\n\n{_ABOUT['vllm']}\n\n{_table(VllmConfig)}")
    parts.append("## Other environment variables\n\n| variable | meaning |\n|---|---|\n")
    parts[-1] += "".join(f"| `{name}` | {text} |\n" for name, text in OTHER_VARIABLES.items())
    parts.append(
        "# Recipes of `livedraft distill`\n\nA TOML file named by `--recipe`; flags go over it (`docs/distill.md`).\n"
    )
    for section, kind in (("run", DistillRunConfig), ("distill", DistillConfig)):
        parts.append(f"## [{section}]\n\n{_ABOUT[section]}\n\n{_table(kind)}")
    return "\n".join(parts)


def _table(kind: type) -> str:
    documents = field_documents(kind)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for one in fields(kind):
        default = "required" if one.default is MISSING else _shown(one.default)
        rows.append(f"| `{one.name}` | {_type(str(one.type))} | {default} | {_cell(documents.get(one.name, ''))} |")
    return "\n".join(rows) + "\n"


def field_documents(kind: type) -> dict[str, str]:
    """Field name -> the string below it in the source, on one line."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    documents: dict[str, str] = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and is_text:
            documents[before.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return documents


def _type(annotation: str) -> str:
    """As a reader of TOML needs it: `Literal["a", "b"] | None` is "a" or "b"."""
    annotation = annotation.removesuffix(" | None")
    if annotation.startswith("tuple["):
        each = annotation[len("tuple[") : -len(", ...]")]
        return f"list of {'texts' if each == 'str' else 'tables' if each == 'RouteRule' else _type(each)}"
    if annotation in _CHOICES:
        return " or ".join(f"`{choice}`" for choice in _CHOICES[annotation])
    if annotation.startswith("Literal["):
        return " or ".join(f"`{choice.strip(_QUOTES)}`" for choice in annotation[len("Literal[") : -1].split(", "))
    return {
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "true or false",
    }[annotation]


def _shown(value: Any) -> str:
    return "not set" if value is None else f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
