"""Replies of a model on disk: a file each, which any number of processes may read and write."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seeupo_jax.configuration.user_code import expand_home


class ReplyCache:
    """Texts by the request that they answer.

    Args:
      folder: made with its first file.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = expand_home(folder)

    def get(self, request: Mapping[str, Any]) -> str | None:
        """The reply to a request; None where there is none, or its file cannot be read."""
        try:
            stored = json.loads(self._path(request).read_bytes())
        except (OSError, ValueError):
            return None
        reply = stored.get("reply") if isinstance(stored, dict) else None
        return reply if isinstance(reply, str) else None

    def put(self, request: Mapping[str, Any], reply: str) -> None:
        """Keeps a reply: all of its file or nothing, whoever else writes the same one.

        It is not synced: a file that a power cut empties is a reply that is asked for again.
        """
        path = self._path(request)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        try:
            # Whoever may read other new files may read it.
            with temporary.open("x", encoding="utf-8") as file:
                json.dump({"request": request, "reply": reply}, file)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _path(self, request: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        return self._folder / digest[:2] / f"{digest}.json"
