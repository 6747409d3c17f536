"""What was measured, where: tree hashes of the sources, the device and its state.

A hash is git's tree hash, computed from the files themselves, so it needs no repository: a copy of
the working tree on a GPU machine gives the hash that `git rev-parse HEAD:csrc` prints.
"""

import hashlib
import os
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = "FLASH_CSA_TREE"  # git rev-parse HEAD:csrc, where there is no repository


def tree_hash(folder: Path) -> str:
    """Git's hash of a folder of plain files, none of them executable or ignored; "" without one."""
    return _tree(folder).hex() if folder.is_dir() else ""


def _tree(folder: Path) -> bytes:
    entries = []
    for path in folder.iterdir():
        if path.is_dir():
            if any(child.is_file() for child in path.rglob("*")):  # git has no empty folders
                entries.append((path.name + "/", b"40000", path.name, _tree(path)))
        else:
            blob = _object(b"blob", path.read_bytes())
            entries.append((path.name, b"100644", path.name, blob))
    lines = (
        mode + b" " + name.encode() + b"\0" + digest for _, mode, name, digest in sorted(entries)
    )
    return _object(b"tree", b"".join(lines))


def _object(kind: bytes, data: bytes) -> bytes:
    return hashlib.sha1(kind + b" " + str(len(data)).encode() + b"\0" + data).digest()


def trees(stage: str, root: Path = ROOT) -> dict[str, str]:
    """The hashes that a row of a stage carries; of "a+b" those of both folders, in that form."""
    csrc = root / "csrc"
    folders = stage.split("+") if stage else []
    return {
        "tree_core": tree_hash(csrc / "core"),
        "tree_common": tree_hash(csrc / "sm90" / "common"),
        "tree_stage": "+".join(tree_hash(csrc / "sm90" / folder) for folder in folders),
    }


def committed_tree(root: Path = ROOT) -> str | None:
    """The hash of csrc that is committed: from git, else from FLASH_CSA_TREE; None if unknown."""
    if not (root / ".git").exists():
        return os.environ.get(COMMITTED)
    command = ["git", "-C", str(root), "rev-parse", "HEAD:csrc"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else os.environ.get(COMMITTED)


def is_dirty(root: Path = ROOT) -> bool:
    """Whether csrc differs from what is committed, or nobody can tell."""
    return committed_tree(root) != tree_hash(root / "csrc")


def device_facts(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
    }


def device_state(device: torch.device) -> dict[str, Any]:
    """SM clock in MHz and power in W, as the driver reports them now; None without it."""
    unknown = {"clock": None, "power": None}
    if device.type != "cuda":
        return unknown
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        # Not its number: CUDA_VISIBLE_DEVICES numbers devices anew, for us alone.
        uuid = torch.cuda.get_device_properties(device).uuid
        text = subprocess.check_output([*query, f"--id=GPU-{uuid}"], text=True)
        clock, power = text.strip().split(",")
        return {"clock": float(clock), "power": float(power)}
    except (OSError, subprocess.CalledProcessError, ValueError):
        return unknown


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
