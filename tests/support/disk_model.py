"""What a disk holds after a power cut, computed from the calls that `FaultFs` has logged.

POSIX promises no more than what was synced: a file's bytes by an fsync of the file, a folder's
names by one of the folder. Everything later may be on the disk or not, for each folder on its own.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fault_fs import Call, FaultFs

_GROWN = b"\0" * 40  # a file's new length may be on the disk without its bytes


@dataclass(eq=False)
class _File:
    """synced: the copy of what it held then; None: it was empty. touched: written to since then.

    emptied: since then.
    """

    synced: Path | None = None
    touched: bool = False
    emptied: bool = False


@dataclass(eq=False)
class _Folder:
    """Names as the processes see them, and those that were synced."""

    live: dict[str, _Node] = field(default_factory=dict)
    synced: dict[str, _Node] = field(default_factory=dict)


_Node = _File | _Folder
# Whether a folder's names, or a file's bytes, are on the disk as processes see them; else synced.
View = Callable[[], bool]
# By path below the root: None for a folder, for a file the copy of what was synced, if anything
# was, and what is behind it.
Disk = Mapping[str, tuple[Path | None, bytes] | None]


def only_synced() -> bool:
    """The least that a disk may hold."""
    return False


def all_names() -> bool:
    """Names are on the disk as soon as they are made, and bytes when they are synced."""
    return True


def by_chance(seed: str) -> View:
    """Each folder and file for itself."""
    draw = random.Random(seed)
    return lambda: draw.random() < 0.5


class DiskModel:
    """A folder below which all changes were logged; empty when the log begins."""

    def __init__(self, faults: FaultFs):
        self._root, self._copies = faults.root, faults.log
        self._tree = _Folder()

    def apply(self, call: Call) -> None:
        """Does what a call did."""
        if call.error or call.path == str(self._root):
            if not call.error:
                assert call.kind == "sync", call
                self._tree.synced = dict(self._tree.live)
            return
        _APPLY[call.kind](self, call)

    def disk(self, view: View, part: str) -> Disk:
        """What the disk holds of a file or folder in the root if the power is cut now."""
        return dict(_disk(self._tree, view, "", lambda name: name == part))

    def names(self, folder: str) -> list[str]:
        """What processes see in a folder below the root; [] without it."""
        node: _Node | None = self._tree
        for each in Path(folder).parts:
            node = node.live.get(each) if isinstance(node, _Folder) else None
        return list(node.live) if isinstance(node, _Folder) else []

    def _parent(self, path: str) -> tuple[_Folder, str]:
        *folders, name = Path(path).relative_to(self._root).parts
        node = self._tree
        for each in folders:
            node = node.live[each]
            assert isinstance(node, _Folder), path
        return node, name

    def _file(self, path: str) -> _File:
        parent, name = self._parent(path)
        node = parent.live[name]
        assert isinstance(node, _File), path
        return node

    def _open(self, call: Call) -> None:
        parent, name = self._parent(call.path)
        node = parent.live.setdefault(name, _File())
        if call.flags & os.O_TRUNC and isinstance(node, _File):
            node.emptied = node.touched = True

    def _change(self, call: Call) -> None:
        if not call.path.endswith(" (deleted)"):
            self._file(call.path).touched = True

    def _rename(self, call: Call) -> None:
        source, old = self._parent(call.other)
        target, new = self._parent(call.path)
        target.live[new] = source.live.pop(old)

    def _link(self, call: Call) -> None:
        assert call.other, f"a symbolic link is not modelled: {call}"
        source, old = self._parent(call.other)
        target, new = self._parent(call.path)
        target.live[new] = source.live[old]

    def _unlink(self, call: Call) -> None:
        parent, name = self._parent(call.path)
        del parent.live[name]

    def _make(self, call: Call) -> None:
        parent, name = self._parent(call.path)
        parent.live[name] = _Folder()

    def _sync(self, call: Call) -> None:
        parent, name = self._parent(call.path)
        node = parent.live[name]
        if isinstance(node, _Folder):
            node.synced = dict(node.live)
        else:
            node.synced, node.touched, node.emptied = self._copies / call.other, False, False


_APPLY = {
    "open": DiskModel._open,
    "write": DiskModel._change,
    "truncate": DiskModel._change,
    "rename": DiskModel._rename,
    "link": DiskModel._link,
    "unlink": DiskModel._unlink,
    "mkdir": DiskModel._make,
    "sync": DiskModel._sync,
}


def _disk(
    folder: _Folder, view: View, place: str, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, tuple[Path | None, bytes] | None]]:
    names = folder.synced
    if folder.live != folder.synced and view():
        names = folder.live
    for name, node in names.items():
        if not wanted(name):
            continue
        path = f"{place}{name}"
        if isinstance(node, _Folder):
            yield path, None
            yield from _disk(node, view, f"{path}/")
        elif node.touched and view():
            yield path, (None if node.emptied else node.synced, _GROWN)
        else:
            yield path, (node.synced, b"")


def write_disk(disk: Disk, place: Path) -> None:
    """Writes what a disk holds into a folder that is empty or not there."""
    place.mkdir(exist_ok=True)
    for path, content in disk.items():
        if content is None:
            (place / path).mkdir()
        else:
            synced, behind = content
            (place / path).write_bytes((b"" if synced is None else synced.read_bytes()) + behind)
