"""Where something is in the user's model and code: readable module names, and file:line without machine paths."""

import os
import re
from dataclasses import dataclass

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "([^"]*)", line (\d+)[^\n]*(?:(?=\n *([^\n]*))|)')


@dataclass(frozen=True)
class Origin:
    """Where a site is: exact dotted module name, the module's class, the user's file:line."""

    module: str
    module_class: str
    source: str


def shared_modules(stacks: list[tuple]) -> tuple:
    """The modules, outermost first, that all the stacks begin with."""
    shared = []
    for levels in zip(*stacks, strict=False):
        if any(level[0] != levels[0][0] for level in levels):
            break
        shared.append(levels[0])
    return tuple(shared)


def owner_before(owner: str, path: str) -> str:
    """`model.layers.0.attn` for the parameter of `model.layers.0.attn.q`, whose path is `q.weight`."""
    inside = path.rpartition(".")[0]
    return owner.removesuffix(inside).rstrip(".") if owner.endswith(inside) else ""


def readable(path: str) -> str:
    """`L['self'].model.layers[0].attn` as `model.layers.0.attn`."""
    path = re.sub(r"^L\[['\"][^'\"]*['\"]\]", "", path)
    path = re.sub(r"(?:\._modules|\._parameters)?\[(['\"]?)(.*?)\1\]", r".\2", path)
    return path.strip(".")


def source_line(traces: list[str]) -> str:
    """file:line of the user's innermost frame: below the working directory or site-packages, without machine paths."""
    return next((source for source, _ in map(user_line, traces) if source), "")


def user_line(trace: str) -> tuple[str, str]:
    """The user's innermost frame of a stack trace: its file:line, and what stands there; both "" if there is none."""
    frames = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith(_TORCH)]
    if not frames:
        return "", ""
    file, line, text = frames[-1]
    return f"{short_path(file)}:{line}", "" if text.startswith('File "') else text


def short_path(file: str) -> str:
    for part in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if part in file:
            return file.split(part, 1)[1]
    try:
        inside = os.path.relpath(file)
    except ValueError:
        return os.path.basename(file)
    return os.path.basename(file) if inside.startswith("..") else inside
