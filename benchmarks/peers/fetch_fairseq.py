"""Puts single files of fairseq into this environment: `nan_detector.py` becomes the module `fairseq_nan_detector`.

Run: .venv-peers/bin/python benchmarks/peers/fetch_fairseq.py nan_detector.py

fairseq itself does not install beside a current torch, and these files need nothing of the rest: pip fetches the
published source archive, whose hash is pinned, and the files are unpacked from it. They are never part of this
repository.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

ARCHIVE = "fairseq-0.12.2"
REQUIREMENT = "fairseq==0.12.2 --hash=sha256:34f1b18426bf3844714534162f065ab733e049597476daa35fffb4d06a92b524\n"


def main(names: list[str]) -> int:
    """Fetch and unpack the files of these names below `fairseq/`; those that are there already are kept."""
    library = Path(sysconfig.get_paths()["purelib"])
    missing = {name: target for name in names if not (target := library / f"fairseq_{Path(name).name}").exists()}
    if not missing:
        return 0
    with TemporaryDirectory() as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(REQUIREMENT, encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "fairseq"]
        if subprocess.run([*command, "--dest", folder, "-r", str(wanted)], check=False).returncode:
            print("fairseq could not be fetched: what compares with it will say that it is missing", file=sys.stderr)
            return 0
        with tarfile.open(Path(folder) / f"{ARCHIVE}.tar.gz") as archive:
            for name, target in missing.items():
                member = archive.extractfile(f"{ARCHIVE}/fairseq/{name}")
                if member is None:
                    raise FileNotFoundError(f"{ARCHIVE} has no {name}")
                target.write_bytes(member.read())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
