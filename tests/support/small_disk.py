"""A disk of one's own, as a file: ext4 on a loop device, of which a power cut leaves a copy."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_MIB = 2**20
_TRIES = 100


def can_mount() -> bool:
    """Whether this process may make a disk and mount it."""
    return not _lacks()


def require_root() -> None:
    """Skips the test where no disk can be mounted, unless SEEUPO_REQUIRE_ROOT is set."""
    if lacks := _lacks():
        assert not os.environ.get("SEEUPO_REQUIRE_ROOT"), f"{lacks}; it is required here"
        pytest.skip(f"a disk is to be mounted: {lacks}")


@functools.cache
def _lacks() -> str:
    """Why no disk can be mounted; empty: it can."""
    missing = [name for name in ("mkfs.ext4", "mount", "umount") if shutil.which(name) is None]
    if os.geteuid():
        return "got no root"
    if missing:
        return f"got no {missing[0]}"
    with tempfile.TemporaryDirectory() as folder:
        image = _make(Path(folder) / "image", 4)
        command = ["mount", "-o", "loop", image, folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if not done.returncode:
            subprocess.run(["umount", folder], check=True)
        return done.stderr.strip()


def _make(image: Path, mib: int) -> Path:
    with image.open("xb") as file:
        file.truncate(mib * _MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    return image


@contextlib.contextmanager
def mounted(image: Path, place: Path) -> Iterator[Path]:
    """Mounts an image, which repairs it by its journal."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@contextlib.contextmanager
def small_disk(folder: Path, mib: int = 32) -> Iterator[tuple[Path, Path]]:
    """An image with ext4's default options, and where it is mounted."""
    folder.mkdir()
    image = _make(folder / "image", mib)
    with mounted(image, folder / "disk") as disk:
        yield image, disk


@contextlib.contextmanager
def power_cut(image: Path, folder: Path) -> Iterator[Path]:
    """The disk as it is after a power cut now, mounted; whoever writes to it should be stopped.

    What the system holds in memory is in no copy of the image.
    """
    folder.mkdir()
    copy = folder / "image"
    copy.write_bytes(_at_one_moment(image))
    try:
        with mounted(copy, folder / "disk") as disk:
            yield disk
    finally:
        shutil.rmtree(folder)


def _at_one_moment(image: Path) -> bytes:
    """The image's bytes, which the system changes at times of its own: two readings are alike."""
    before = image.read_bytes()
    for _ in range(_TRIES):
        after = image.read_bytes()
        if after == before:
            return after
        before = after
        time.sleep(0.01)
    raise AssertionError(f"{image} is written to all the time")
