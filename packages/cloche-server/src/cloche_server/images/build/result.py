"""The config document of what a build made: OCI's, with Docker's additions (Shell, Healthcheck). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloche_server.images.build.protocols import LayerRef
from cloche_server.images.build.steps import Config

NO_TIME = "1970-01-01T00:00:00Z"
MERGED = "its files are in a later layer"


@dataclass(frozen=True)
class Past:
    """One instruction of the history."""

    created: str
    text: str
    changes_files: bool


def document(
    base: Mapping[str, Any] | None,
    base_layers: int,
    config: Config,
    layers: Sequence[LayerRef],
    past: Sequence[Past],
    platform: str,
) -> dict[str, Any]:
    """`base`: the base image's config document; `past`: all instructions since, those of stages below too.

    Fewer layers than instructions that change files: a layer holds what its room did since it was opened, so the later
    instructions have them.
    """
    os_name, _, machine = platform.partition("/")
    own = max(0, len(layers) - base_layers)
    base_history = _history(base, len(layers) - own)
    changing = [index for index, each in enumerate(past) if each.changes_files]
    with_layer = set(changing[len(changing) - own :]) if own else set()
    created = [each["created"] for each in base_history if isinstance(each.get("created"), str)]
    made = {
        "created": max([*created, *(each.created for each in past)], default=NO_TIME),
        "architecture": machine.partition("/")[0],
        "os": os_name,
        "config": _config(config),
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [*base_history, *(_line(each, index in with_layer) for index, each in enumerate(past))],
    }
    if config.author is not None:
        made["author"] = config.author
    return made


def _config(config: Config) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "Env": [f"{name}={value}" for name, value in config.env.items()],
        "User": config.user,
        "WorkingDir": config.workdir,
        "Entrypoint": list(config.entrypoint or ()),
        "Cmd": list(config.cmd or ()),
        "Labels": dict(config.labels),
        "ExposedPorts": {port: {} for port in config.ports},
        "Volumes": {path: {} for path in config.volumes},
        "StopSignal": config.stop_signal,
        "Shell": list(config.shell),
        "Healthcheck": config.healthcheck,
    }
    return {name: value for name, value in fields.items() if value}


def _line(each: Past, has_layer: bool) -> dict[str, Any]:
    line: dict[str, Any] = {"created": each.created, "created_by": each.text}
    if not has_layer:
        line["empty_layer"] = True
        if each.changes_files:
            line["comment"] = MERGED
    return line


def _history(base: Mapping[str, Any] | None, layers: int) -> list[dict[str, Any]]:
    """The base's own, when it is about as many layers as there are; else one line a layer."""
    given = base.get("history") if base is not None else None
    lines = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    if sum(each.get("empty_layer") is not True for each in lines) == layers:
        return lines
    return [{"created": NO_TIME, "created_by": "base image"} for _ in range(layers)]
