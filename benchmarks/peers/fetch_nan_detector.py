"""Puts fairseq's one file `nan_detector.py` into this environment, as the module `fairseq_nan_detector`.

Run: .venv-peers/bin/python benchmarks/peers/fetch_nan_detector.py

fairseq itself does not install beside a current torch, and its file needs nothing of the rest: pip fetches the
published source archive, whose hash is pinned, and the file is unpacked from it. It is never part of this repository.
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
MEMBER = f"{ARCHIVE}/fairseq/nan_detector.py"


def main() -> int:
    """Fetch and unpack; a file that is there already is kept."""
    target = Path(sysconfig.get_paths()["purelib"]) / "fairseq_nan_detector.py"
    if target.exists():
        return 0
    with TemporaryDirectory() as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(REQUIREMENT, encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "fairseq"]
        if subprocess.run([*command, "--dest", folder, "-r", str(wanted)], check=False).returncode:
            print(
                "fairseq could not be fetched: its row of the comparison will say that it is missing", file=sys.stderr
            )
            return 0
        with tarfile.open(Path(folder) / f"{ARCHIVE}.tar.gz") as archive:
            member = archive.extractfile(MEMBER)
            if member is None:
                raise FileNotFoundError(f"{ARCHIVE} has no {MEMBER}")
            target.write_bytes(member.read())
    return 0


if __name__ == "__main__":
    sys.exit(main())
