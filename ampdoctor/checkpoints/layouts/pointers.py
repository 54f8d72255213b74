"""Files that name the newest of several checkpoints beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from ampdoctor.checkpoints.storage.files import RegularFile, is_folder, plain_name
from ampdoctor.checkpoints.storage.listing import Listing
from ampdoctor.errors import CheckpointError

_MAX_BYTES = 256


def _iteration(text: str) -> str:
    return f"iter_{int(text):07d}" if text.isascii() and text.isdigit() and len(text) < 16 else text


_POINTERS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {"latest": str, "latest_checkpointed_iteration.txt": _iteration}
)
"""Pointers and how they name it: DeepSpeed by its folder, Megatron by its iteration or "release"."""


def is_pointer(name: str) -> bool:
    """Does a file of this name point to the newest checkpoint beside it?"""
    return name in _POINTERS


def pointer_in(listing: Listing) -> str | None:
    """The name of the pointer among a folder's files; None where there is none."""
    return next((name for name in _POINTERS if name in listing.names and name not in listing.folders), None)


def target_of(folder: Path, pointer: str) -> str:
    """Returns the folder beside a pointer that the pointer names; it need not exist.

    Raises:
        CheckpointError: The pointer cannot be read, or its text is not a plain name.
    """
    with RegularFile(folder / pointer, pointer) as file:
        if file.size > _MAX_BYTES:
            raise CheckpointError(f"{pointer} is {file.size} bytes long, which is no folder's name.")
        try:
            text = file.read(0, file.size).decode("utf-8").strip()
        except UnicodeDecodeError:
            raise CheckpointError(f"{pointer} is not text.") from None
    return plain_name(_POINTERS[pointer](text), pointer, "folder")


def folder_inside(folder: Path, link: str) -> Path | None:
    """Returns where a link in a folder leads, if that is a folder below this one; None for anything else.

    Open the returned path, not the link: the link may lead elsewhere by then.

    Args:
        folder: The folder that was named.
        link: The link's name in it.
    """
    try:
        root, target = folder.resolve(strict=True), (folder / link).resolve(strict=True)
    except (OSError, RuntimeError):  # it leads to nothing, or in circles (a RuntimeError before Python 3.13)
        return None
    return target if target != root and target.is_relative_to(root) and is_folder(target) else None
