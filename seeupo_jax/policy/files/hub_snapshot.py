"""Models of the Hugging Face Hub by their names, downloaded once to the hub's own cache."""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.constants import DEFAULT_REVISION
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from seeupo_jax.configuration.user_code import describe

_LOGGER = logging.getLogger(__name__)
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-][\w./-]*))?", re.ASCII)
# Of a repository's own folder: those below it hold other formats of the same weights.
_READ = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_NOT_READ = ["*/*", "consolidated*"]
# Of one whose own folder has neither of these files: adapters per turn, each in a folder.
_CONFIGS = ("config.json", "adapter_config.json")
_OF_TURNS = ["adapter_*/adapter_config.json", "adapter_*/adapter_model.safetensors"]


def is_hub_name(path: str | Path) -> bool:
    """Whether a model path is OWNER/NAME or OWNER/NAME@REVISION, and nothing of that name here."""
    return _NAME.fullmatch(str(path)) is not None and not os.path.lexists(path)


def split_revision(path: str) -> tuple[str, str | None]:
    """The repository, OWNER/NAME, and the revision of a name of the hub; None: its newest."""
    match = _NAME.fullmatch(path)
    assert match is not None, path
    return match[1], match[2]


@functools.lru_cache  # a run reads one model, whatever is pushed to the hub meanwhile
def hub_snapshot(path: str) -> Path:
    """The folder of a model of the hub, in the hub's cache; missing files are downloaded.

    Progress goes to standard error. Several processes of a machine download each file once: the
    hub's library holds a lock. Without a network, the newest snapshot in the cache is taken.

    Args:
      path: as of `is_hub_name`.

    Raises:
      ValueError: it is neither in the cache, nor can it be downloaded; the text continues a list
        of what a model path may be.
    """
    repo, revision = split_revision(path)
    try:
        if cached_snapshot(path) is None:
            _announce(repo, revision or DEFAULT_REVISION)
        return Path(_download(repo, revision))
    except (HTTPError, OSError) as error:
        more = "" if revision is None else f" --revision {revision}"
        raise ValueError(
            f"a model of the Hugging Face Hub, which {path} could not be downloaded from"
            f" ({_endpoint()}: {_reason(error)}): `hf download {repo}{more} --local-dir {path}`"
            " writes such a folder where there is a network"
        ) from error


def cached_snapshot(path: str) -> Path | None:
    """The folder of a model of the hub where the cache has all of it, without a network."""
    try:
        return Path(_download(*split_revision(path), local_files_only=True))
    except OSError:
        return None


def hub_revision(path: str | Path | None) -> str | None:
    """The commit that the name of a model resolves to; None: the path is no name of the hub."""
    if path is None or not is_hub_name(path):
        return None
    return hub_snapshot(str(path)).name


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _announce(repo: str, revision: str) -> None:
    """Says what is about to be downloaded, from where, and how much it is."""
    hub = huggingface_hub.HfApi(endpoint=_endpoint(), library_name="seeupo_jax")
    files = hub.model_info(repo, revision=revision, files_metadata=True).siblings or []
    sizes = {file.rfilename: file.size or 0 for file in files}
    read = filter_repo_objects(sizes, allow_patterns=_READ, ignore_patterns=_NOT_READ)
    size = sum(sizes[name] for name in read) / 1e9
    _LOGGER.warning("model path: %s is downloaded from %s (%.2f GB).", repo, _endpoint(), size)


def _download(repo: str, revision: str | None, *, local_files_only: bool = False) -> str:
    download = functools.partial(
        huggingface_hub.snapshot_download,
        repo,
        revision=revision,
        endpoint=_endpoint(),
        library_name="seeupo_jax",
        local_files_only=local_files_only,
    )
    folder = download(allow_patterns=_READ, ignore_patterns=_NOT_READ)
    if not any(os.path.isfile(os.path.join(folder, name)) for name in _CONFIGS):
        return download(allow_patterns=_OF_TURNS)
    return folder


def _reason(error: Exception) -> str:
    """The hub's answer in a line, or that of the network where the cache has nothing either."""
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
    return describe(cause if isinstance(cause, Exception) else error)
