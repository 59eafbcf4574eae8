"""`livedraft bench table`: what `bench distill`, `bench replay` and `distill` measured, kept as their own JSON, as one Markdown
table. No figure is typed twice: README's table is what this prints with `--brief`.

A folder holds one file a run, the output of `--json` as it is. Its field `run` (see `livedraft/bench/machine.py`) says by which
command, where, when and with which seeds; a file without it, of an older version, has dashes there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from livedraft.records import UserError

BEGIN, END = "<!-- bench table -->", "<!-- /bench table -->"
COMPARISONS = ("equal steps", "equal FLOPs", "equal selected tokens")
_HEADER = ("on", "draft", "alpha", *(f"− DistillSpec, {kind}" for kind in COMPARISONS), "run")
_NAME_OF_ARM = {
    "livedraft": "livedraft, online", "osd": "OSD as published, online", "static:INIT": "untrained, never trained",
}  # fmt: skip
_MAIN_ARMS = ("distillspec", "top 0.4", "random 0.4")
"""Of a study: the baseline, the published selection and its control. The rest and the losses are left out in a brief one."""
_NOTHING = "–"
_USUAL_LAYERS = 2
"""Of a draft: what a table of two-layer drafts need not repeat."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One draft."""

    data: str
    draft: str
    alpha: str
    differences: Sequence[str] = ()
    """As COMPARISONS has them; none is as good as dashes."""
    is_main: bool = True


def run(folder: Path, *, is_brief: bool, write: Path | None, as_json: bool) -> None:
    """Print the table, or put it between the markers of a Markdown file. Raises UserError for what is not there or is of
    another kind."""
    text = rendered(folder, is_brief=is_brief, page=write)
    if write is not None:
        put_between_markers(write, text)
        text = f"{write} holds the table of {folder} now.\n"
    print(json.dumps({"table": text, "file": write and str(write)}) if as_json else text, end="\n" if as_json else "")


def rendered(folder: Path, *, is_brief: bool = False, page: Path | None = None) -> str:
    """The table of all files, in the order of their names, and where each is from; brief: its main rows. Links lead there from
    the page, or from here."""
    results = {path: _read(path) for path in sorted(folder.glob("*.json"))}
    if not results:
        raise UserError(f"{folder} holds no .json file of a run.")
    lines = ["| " + " | ".join(_HEADER) + " |", "|" + "---|" * len(_HEADER)]
    for number, (path, result) in enumerate(results.items(), start=1):
        link = path.as_posix() if page is None else Path(os.path.relpath(path, page.parent)).as_posix()
        for row in (row for row in _rows(path, result) if row.is_main or not is_brief):
            differences = [*row.differences, *[_NOTHING] * len(COMPARISONS)][: len(COMPARISONS)]
            cells = (row.data, row.draft, row.alpha, *differences, f"[{number}]({link})")
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(_origin(number, result) for number, result in enumerate(results.values(), start=1))]
    return "\n".join(lines) + "\n"


def put_between_markers(file: Path, text: str) -> None:
    """Raises UserError when the file lacks the markers or cannot be written."""
    try:
        whole = file.read_text(encoding="utf-8")
        before, begin, rest = whole.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise UserError(f"{file} has no lines {BEGIN} and {END} for the table to stand between.")
        file.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}).") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(result, dict) or not {"selection", "arms", "initial_alpha"} & result.keys():
        raise UserError(f"{path} is no output of `bench distill --json`, `bench replay --json` or `distill --json`.")
    return result


def _rows(path: Path, result: dict[str, Any]) -> Iterator[Row]:
    data = result.get("run", {}).get("data") or path.stem
    try:
        if "selection" in result:
            yield from _of_study(data, result)
        elif "arms" in result:
            yield from _of_replay(data, result["arms"])
        else:
            yield from _of_distill(data, result)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} lacks a figure that the table shows ({error!r}).") from error


# --- the three kinds --------------------------------------------------------------------------------------------------


def _of_study(data: str, result: dict[str, Any]) -> Iterator[Row]:
    layers = result.get("layers", _USUAL_LAYERS)
    data = data if layers == _USUAL_LAYERS else f"{data}, {layers} layers"
    for name, figures in result["selection"].items():
        differences = [_shown(figures.get(kind), sign=True) for kind in COMPARISONS]
        draft = "DistillSpec" if name == "distillspec" else f"AdaSPEC, {_percent(name)}"
        yield Row(
            data=data, draft=draft, alpha=_shown(figures["alpha"]), differences=differences, is_main=name in _MAIN_ARMS
        )  # fmt: skip
    for kind, losses in result.get("losses", {}).items():
        for loss, figures in losses.items():
            alpha = "failed" if "failed" in figures else _shown(figures["alpha"])
            yield Row(data=data, draft=f"DistillSpec, {loss}, {kind}, one seed", alpha=alpha, is_main=False)


def _percent(arm: str) -> str:
    """ "top 0.4, full rate" to "top 40 %, full rate"."""
    keep, _, rest = arm.partition(" ")
    fraction, comma, rest = rest.partition(",")
    return f"{keep} {float(fraction):.0%}{comma}{rest}".replace("%", " %")


def _of_distill(data: str, result: dict[str, Any]) -> Iterator[Row]:
    unusual = result.get("run", {}).get("settings", {})
    told_apart = "".join(f", {name} {value}" for name, value in unusual.items())
    steps = [result.get(f"{name}_training", {}).get("step") for name in ("distillspec", "adaspec")]
    for name, draft in (("initial", "untrained"), ("distillspec", "DistillSpec"), ("adaspec", "AdaSPEC")):
        if result.get(f"{name}_alpha") is not None:
            is_equal = (
                name == "adaspec" and steps[0] == steps[1]
            )  # else the two had unequal epochs, or a reference was given
            difference = result.get("adaspec_minus_distillspec") if is_equal else None
            yield Row(
                data=data, draft=draft if name == "initial" else draft + told_apart, alpha=_shown(result[f"{name}_alpha"]),
                differences=[_shown(difference, sign=True)],
            )  # fmt: skip


def _of_replay(data: str, arms: dict[str, Any]) -> Iterator[Row]:
    for arm, figures in arms.items():
        for segment in figures.get("segments") or [figures | {"name": data}]:
            first, last = (_figure(segment[f"alpha_{side}_100"]) for side in ("first", "last"))
            yield Row(data=segment["name"], draft=_arm(arm), alpha=f"{first} → {last}")


def _arm(arm: str) -> str:
    share = arm.removeprefix("static:")
    if arm in _NAME_OF_ARM:
        return _NAME_OF_ARM[arm]
    if share.endswith("%"):
        return f"DistillSpec on the stream's first {share[:-1]} %, then static"
    return "distilled before, then static"


# --- words and figures ------------------------------------------------------------------------------------------------


def _shown(figure: dict[str, float] | None, *, sign: bool = False) -> str:
    """A mean with its interval where it has one."""
    if figure is None:
        return _NOTHING
    mean = _figure(figure["mean"], sign=sign)
    if "low" not in figure:
        return mean
    return f"{mean} [{_figure(figure['low'], sign=sign)}, {_figure(figure['high'], sign=sign)}]"


def _figure(value: float | None, *, sign: bool = False) -> str:
    """Three places without the zero before them."""
    if value is None:
        return _NOTHING
    digits = f"{abs(value):.3f}"
    digits = digits[1:] if digits.startswith("0") else digits
    return ("−" if value < 0 else "+" if sign else "") + digits


def _origin(number: int, result: dict[str, Any]) -> str:
    about = result.get("run", {})
    seeds = about.get("seeds", result.get("seeds", [result["seed"]] if "seed" in result else None))
    command = f"`{about['command']}`" if "command" in about else "command not kept"
    parts = [
        command,
        f"seeds {', '.join(map(str, seeds))}" if seeds is not None else "seeds not kept",
        about.get("machine", "machine not kept"),
        about.get("date", "date not kept"),
    ]
    note = f". {about['note']}" if "note" in about else ""
    return f"{number}. {'; '.join(parts)}{note}"
