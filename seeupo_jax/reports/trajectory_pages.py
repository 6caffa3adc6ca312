"""Pages of trajectories for a browser, without a server or network.

`trajectories/index.html` of a work directory reads `data/index.js`, a row per trajectory, and loads
`data/SHARD-DIGEST-NN.js`, whole records, when one of them is opened.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from seeupo_jax.durable_files import write_atomically
from seeupo_jax.errors import file_error, name_file
from seeupo_jax.metrics.run_manifest import read_run_manifest
from seeupo_jax.parallel.file_lock import exclusive
from seeupo_jax.trajectories.json_lines import plain
from seeupo_jax.trajectories.reader import FOLDER, TrajectoryFile, find_shards, read_shard

CHUNK = 1_000_000  # characters of records in a chunk; one record may be longer
LAYOUT = "2"  # of the files in data/; files of another version are rewritten
# Columns of few different values, which are written once each.
_REPEATED = ("source", "task_id", "labels", "stop", "failure", "chunk")


def write_pages(workdir: str | Path, *, report: str | None = "../report.html") -> Path:
    """Writes WORKDIR/trajectories/index.html and its data; returns its path.

    May be called while the run trains. Unchanged trajectory files keep their pages' files; missing
    and damaged ones are rewritten. The index is replaced once all files that it names exist, and
    only then are unused files removed. Files that the run removes meanwhile are left out.

    Args:
      report: address of the report, as seen from the page, which gets a link to it; None: no link.

    Raises:
      ValueError: no such folder, a trajectory file that holds no records, files that cannot
        be read or written, or pages that another process is writing.
      OSError: as of `file_error`: the disk failed, or is full.
    """
    workdir = Path(workdir)
    if not workdir.is_dir():
        raise ValueError(
            f"workdir: got {str(workdir)!r}; allowed: a folder that a run has written."
        )
    home = workdir / FOLDER
    try:
        (home / "data").mkdir(parents=True, exist_ok=True)
        with exclusive(home / ".pages.lock", f"workdir: got {workdir}"):
            _write_pages(workdir, home, report)
    except OSError as error:
        if file_error(error) is not None:
            raise
        place = f"{error.filename}: " if error.filename else ""
        raise ValueError(
            f"workdir: got {workdir} ({place}{error.strerror or error}); allowed: a folder whose"
            " trajectories can be read and whose pages can be written."
        ) from None
    return home / "index.html"


def _write_pages(workdir: Path, home: Path, report: str | None) -> None:
    data, parts = home / "data", {}
    for shard in find_shards(workdir):
        path = shard.path(workdir)
        try:
            parts |= _part(data, shard, path)
        except FileNotFoundError:
            if path.exists():
                raise
    rows = [row for rows in parts.values() for row in rows]
    index = {"name": _name(workdir), "report": report, "rows": len(rows), **_columns(rows)}
    for asset in (resources.files("seeupo_jax") / "assets/report/trajectories").iterdir():
        _write(home / asset.name, asset.read_bytes())
    # No `<`: JSON that ends no script and opens no comment, wherever the file is put.
    script = _json(index).replace("<", "\\u003c")
    _write(data / "index.js", f"receiveIndex({script});\n".encode())
    wanted = {"index.js", *parts, *(f"{row['chunk']}.js" for row in rows)}
    for file in data.iterdir():
        if file.name not in wanted:
            file.unlink(missing_ok=True)


def _name(workdir: Path) -> str:
    """The run's name: from run.json, or the folder's."""
    manifest = read_run_manifest(workdir) or {}
    return str(manifest.get("name", workdir.resolve().name))


def _part(data: Path, shard: TrajectoryFile, path: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of a shard, by the name of the file that keeps them; its chunks are written."""
    with name_file(path):
        content = path.read_bytes()
    digest = hashlib.blake2b(LAYOUT.encode() + content, digest_size=6).hexdigest()
    stem = f"{shard.name.partition('.')[0]}-{digest}"
    file = data / f"{stem}.json.gz"
    part = _read_part(file)
    sizes = {} if part is None else part["sizes"]
    if part is None or any(_size(data / name) != size for name, size in sizes.items()):
        part = _write_part(data, stem, shard, path)
        _write(file, _pack(_json(part)))  # it is the last that is written of a shard
    return {file.name: part["rows"]}


def _read_part(file: Path) -> dict[str, Any] | None:
    """The result of an earlier `_write_part`; None if its file is missing or damaged."""
    try:
        return json.loads(gzip.decompress(file.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):
        return None


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.exists() else None


def _write_part(data: Path, stem: str, shard: TrajectoryFile, path: Path) -> dict[str, Any]:
    """Writes a shard's chunks; returns its rows, and the chunks' sizes in bytes by file name."""
    rows, sizes = [], {}
    for number, records in enumerate(_chunks(read_shard(path))):
        chunk = f"{stem}-{number:02d}"
        packed = _pack(f"[{','.join(text for _, text in records)}]")
        script = f'receiveChunk("{chunk}","{base64.b64encode(packed).decode()}");\n'.encode()
        _write(data / f"{chunk}.js", script)
        sizes[f"{chunk}.js"] = len(script)
        rows += [_row(record, shard.kind, chunk, i) for i, (record, _) in enumerate(records)]
    return {"rows": rows, "sizes": sizes}


def _chunks(records: Iterable[dict[str, Any]]) -> Iterator[list[tuple[dict[str, Any], str]]]:
    """Records with their JSON, at most `CHUNK` characters together unless one alone has more."""
    chunk: list[tuple[dict[str, Any], str]] = []
    size = 0
    for record in records:
        text = _json(record)
        if chunk and size + len(text) > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append((record, text))
        size += len(text)
    if chunk:
        yield chunk


def _row(record: dict[str, Any], source: str, chunk: str, place: int) -> dict[str, Any]:
    """A trajectory's row in the list, with the place of its full record."""
    sizes = [abs(weight) for weight in record["weights"] if weight is not None]
    keys = ("iteration", "group", "member", "task_id", "stop", "failed", "failure")
    keys += ("reward", "success", "turns", "advantage")
    return {
        "source": source,
        **{key: record[key] for key in keys},
        "labels": json.dumps(record["labels"], sort_keys=True),
        "weight": max(sizes, default=None),
        "tokens": sum(turn >= 0 for segment in record["segments"] for turn in segment["turn"]),
        "chunk": chunk,
        "place": place,
    }


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows by column; a column of few different values as those, and an index into them a row."""
    columns = {key: [row[key] for row in rows] for key in (rows[0] if rows else ())}
    values = {}
    for key in _REPEATED:
        values[key] = list(dict.fromkeys(columns.get(key, ())))
        codes = {value: code for code, value in enumerate(values[key])}
        columns[key] = [codes[value] for value in columns.get(key, ())]
    return {"columns": columns, "values": values}


def _pack(text: str) -> bytes:
    return gzip.compress(text.encode(), 6, mtime=0)


def _json(value: Any) -> str:
    """ASCII, so that half a character passes; numbers that JSON does not know become null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(plain(value), allow_nan=False, separators=(",", ":"))


def _write(path: Path, content: bytes) -> None:
    """Replaces a file only where it changes."""
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content)
