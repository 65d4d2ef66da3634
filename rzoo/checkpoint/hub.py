"""Checkpoints by their hub id ("org/name"): the local cache first, then the network, both through huggingface_hub."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from rzoo.checkpoint.huggingface import open_folder
from rzoo.core import RzooError

WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
UNWANTED = ["*/*"]  # subfolders hold the same weights again in their makers' own format
BRING = "bring the folder and pass its path"

# Exception of huggingface_hub -> what it means; an exception is looked up by the names of its class and bases.
REASONS = {
    "GatedRepoError": "is gated: its owner must grant access first",
    "RepositoryNotFoundError": "does not exist, or is private",
    "RevisionNotFoundError": "does not have that revision",
}


def looks_like_hub_id(text: str) -> bool:
    """Whether `text` has the form "org/name" of a hub id; a path such as "./name" or "a/b/c" has not."""
    form = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
    if len(text) > 96 or "--" in text or ".." in text or text.endswith((".git", ".gguf", ".safetensors", ".json")):
        return False
    return re.fullmatch(f"{form}/{form}", text, re.ASCII) is not None


def fetch(repo_id: str, *, revision: str | None = None) -> Path:
    """The folder of the checkpoint `repo_id` ("org/name") at `revision` (a branch, tag or commit; None: main).

    A complete copy in the local cache is returned as it is, without asking the hub for a newer one; HF_HOME,
    HF_HUB_OFFLINE and the like hold as always. Only weights, configs, tokenizer and templates are fetched.
    Raises RzooError when huggingface_hub is not installed, or the hub or the repository is out of reach.
    """
    if not looks_like_hub_id(repo_id):
        fix = f'Write "org/name", or {BRING}.'
        raise RzooError(f"hub id ({repo_id!r}) must have the form org/name", field="repo_id", value=repo_id, fix=fix)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        fix = f"pip install rzoo[hub], or {BRING}."
        raise RzooError(
            f"{repo_id} needs the package huggingface_hub", field="repo_id", value=repo_id, fix=fix
        ) from error
    request: dict[str, Any] = {"revision": revision, "allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True, **request))
        open_folder(folder)  # an interrupted download leaves a folder as well
        return folder
    except (LocalEntryNotFoundError, RzooError):
        pass
    try:
        return Path(snapshot_download(repo_id, **request))
    except Exception as error:  # whatever the HTTP library under it raises
        raise _refusal(repo_id, revision, error) from error


def _refusal(repo_id: str, revision: str | None, error: Exception) -> RzooError:
    names = [kind.__name__ for kind in type(error).__mro__]
    reason = next((REASONS[name] for name in names if name in REASONS), None)
    wanted = repo_id if revision is None else f"{repo_id} at {revision}"
    if reason:
        fix = f"Check the id and log in by huggingface_hub.login() where access was granted, or {BRING}."
    else:
        reason = f"is not in the local cache and could not be fetched ({_cause(error)})"
        fix = f"Check the network and HF_HUB_OFFLINE, or {BRING}."
    return RzooError(f"{wanted} {reason}", field="repo_id", value=repo_id, fix=fix)


def _cause(error: BaseException) -> str:
    """What went wrong first, in one short line: the library wraps it into paragraphs of its own."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    if any(type(link).__name__ == "OfflineModeIsEnabled" for link in chain):
        return "HF_HUB_OFFLINE is set"
    return textwrap.shorten(f"{type(chain[-1]).__name__}: {chain[-1]}", 120, placeholder=" …")
