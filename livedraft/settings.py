"""All settings of a server: defaults < TOML file < environment < flags, each room's own frozen dataclass checked once.

The environment writes LIVEDRAFT_SERVER__PORT=9000, the file a table [server] with port = 9000.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from livedraft.config import (
    DistillConfig,
    DistillRunConfig,
    EngineConfig,
    LearningConfig,
    RoutingConfig,
    ServedModelConfig,
    ServerConfig,
    SpeculationConfig,
    VllmConfig,
)
from livedraft.records import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PREFIX = "LIVEDRAFT_"
OTHER_VARIABLES = {
    "LIVEDRAFT_CONFIG": "The settings file to read where `--config` names none.",
    "LIVEDRAFT_MODELS": "Folder of pulled models; the user's cache folder where it is not set.",
    "LIVEDRAFT_KERNELS": "auto, avx512 (no AMX), avx2 or torch: what the compiled step may use; torch switches it off.",
}
"""Read elsewhere; no settings."""
_LISTS = ("api_keys", "attach", "arguments")
"""Keys that the environment writes with commas."""
SECTIONS: dict[str, type] = {
    "model": ServedModelConfig,
    "engine": EngineConfig,
    "speculation": SpeculationConfig,
    "learning": LearningConfig,
    "routing": RoutingConfig,
    "server": ServerConfig,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    model: ServedModelConfig = field(default_factory=ServedModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    learning: LearningConfig = field(default_factory=LearningConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def shown(self) -> dict[str, dict[str, Any]]:
        """For `config show`: every value, keys hidden."""
        values = {name: asdict(getattr(self, name)) for name in SECTIONS}
        values["server"]["api_keys"] = ["***"] * len(self.server.api_keys)
        values["server"]["admin_key"] = self.server.admin_key and "***"
        for rule in values["routing"]["rules"]:
            rule["api_key"] = rule["api_key"] and "***"
        return values


def load_settings(
    file: Path | None, flags: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str] = os.environ
) -> Settings:
    """Raises UserError that names the key, where it came from, and what was probably meant.

    `flags` holds only what was given; None values do not count.
    """
    return Settings(**_merged(SECTIONS, _sources(file, environment, SECTIONS) | {"the command line": _given(flags)}))


def _sources(
    file: Path | None, environment: Mapping[str, str], sections: Mapping[str, type]
) -> dict[str, dict[str, Any]]:
    file = file or (Path(environment["LIVEDRAFT_CONFIG"]) if environment.get("LIVEDRAFT_CONFIG") else None)
    return {str(file): _from_file(file) if file else {}, "the environment": _from_environment(environment, sections)}


def load_vllm_settings(
    file: Path | None, flags: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str] = os.environ
) -> tuple[Settings, VllmConfig]:
    """For `livedraft vllm serve`: the same, with a table [vllm]. Raises UserError as `load_settings`."""
    sections = {**SECTIONS, "vllm": VllmConfig}
    merged = _merged(sections, _sources(file, environment, sections) | {"the command line": _given(flags)})
    config: VllmConfig = merged.pop("vllm")
    return Settings(**merged), config


def load_recipe(file: Path | None, flags: Mapping[str, Mapping[str, Any]]) -> tuple[DistillRunConfig, DistillConfig]:
    """What `livedraft distill` does: defaults < recipe < flags. Raises UserError as `load_settings`."""
    sources = {str(file): _from_file(file) if file else {}, "the command line": _given(flags)}
    merged = _merged({"run": DistillRunConfig, "distill": DistillConfig}, sources)
    return merged["run"], merged["distill"]


def _given(flags: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {k: v for k, v in values.items() if v is not None} for name, values in flags.items()}


def _merged(sections: Mapping[str, type], sources: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each section's dataclass from all sources, later ones first."""
    merged: dict[str, dict[str, Any]] = {name: {} for name in sections}
    origin: dict[tuple[str, str], str] = {}
    for source, values in sources.items():
        for section, entries in values.items():
            _check_name(section, list(sections), source)
            if not isinstance(entries, Mapping):
                raise UserError(f"{section} in {source} must be a table of settings.")
            for key, value in entries.items():
                _check_name(key, [one.name for one in fields(sections[section])], f"[{section}] of {source}")
                merged[section][key] = value
                origin[section, key] = source
    return {section: _section(section, sections[section], values, origin) for section, values in merged.items()}


def _section(section: str, kind: type, values: dict[str, Any], origin: Mapping[tuple[str, str], str]) -> Any:
    try:
        return _adapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        message = first["msg"].removeprefix("Value error, ").rstrip(".")
        where = f" (from {origin[section, key]})" if (section, key) in origin else ""
        raise UserError(f"{section}.{key}: {message}{where}." if key else f"{section}: {message}.") from error


@functools.lru_cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _from_file(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"The settings file {file} is not there.")
    try:
        values: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
        return values
    except (ValueError, OSError) as error:  # what is no TOML, or no UTF-8, is a ValueError
        raise UserError(f"The settings file {file} cannot be read: {error}.") from error


def _from_environment(environment: Mapping[str, str], sections: Mapping[str, type]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    for name, value in environment.items():
        if not name.startswith(_PREFIX) or name in OTHER_VARIABLES:
            continue
        section, _, key = name.removeprefix(_PREFIX).lower().partition("__")
        if section not in sections or not key:
            close = difflib.get_close_matches(name, [*OTHER_VARIABLES, *_all_variables(sections)], n=1)
            known = [f"{_PREFIX}{one.upper()}__..." for one in sections]
            hint = (
                f"nothing known; did you mean {close[0]}?"
                if close
                else f"none of {', '.join([*known, *OTHER_VARIABLES])}."
            )
            raise UserError(f"The environment variable {name} is {hint}")
        values.setdefault(section, {})[key] = tuple(value.split(",")) if key in _LISTS else value
    return values


def _all_variables(sections: Mapping[str, type]) -> list[str]:
    return [f"{_PREFIX}{section}__{one.name}".upper() for section, kind in sections.items() for one in fields(kind)]


def _check_name(name: str, known: list[str], source: str) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]}?" if close else f" Known are {', '.join(known)}."
        raise UserError(f"There is no setting {name!r} in {source}.{hint}")
