"""How fast the files of a workspace are saved, against the plainest way to write the same bytes.

    .venv/bin/python -m paperclip_env.stack run -- .venv/bin/python -m benchmarks.saving

A real sandbox of this host with real files, large and many small ones. `saved` is what a recovery does: read through
the provider, followed as tar, hashed, and written to the file storage, flushed. `tar` is GNU tar into a file that is
flushed. Both in turn, several times, in one run. Prints one JSON object: seconds, MiB/s, and the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import django

_MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=256, help="MiB in large files")
    parser.add_argument("--small", type=int, default=5000, help="how many small files")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "paperclip_env.settings")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PAPERCLIP_ARCHIVE_DIR"] = f"{directory}/archives"
        django.setup()
        print(json.dumps(_measure(Path(directory), asked.mib, asked.small, asked.rounds), indent=2))


def _measure(directory: Path, mib: int, small: int, rounds: int) -> dict[str, object]:
    from leases import archive_storage
    from providers.contract import MARK_INSTALLATION
    from providers.local.provider import LocalConfig, LocalEndpoint, LocalProvider

    provider = LocalProvider(LocalEndpoint(state_dir=str(directory / "sandboxes")))
    created = provider.create(f"pe-{uuid4().hex}", {MARK_INSTALLATION: "benchmark"}, LocalConfig(), within=60)
    resource_id, name = created.resource.resource_id, created.resource.name
    files = directory / "sandboxes" / "sandboxes" / name / "files"
    for number in range(max(1, mib // 64)):
        (files / f"large-{number}").write_bytes(os.urandom(min(mib, 64) * _MIB))
    (files / "small").mkdir()
    for number in range(small):
        (files / "small" / f"{number}.txt").write_bytes(b"x" * 2000)
    seconds: dict[str, list[float]] = {"saved": [], "tar": []}
    size = 0
    try:
        for number in range(rounds):
            began = time.perf_counter()
            with closing(provider.archive(resource_id, ".", within=600)) as pieces:
                size = archive_storage.write(f"benchmark/{number}.tar", pieces).size
            seconds["saved"].append(time.perf_counter() - began)
            plain = directory / f"{number}.tar"
            began = time.perf_counter()
            subprocess.run(["tar", "-C", str(files), "-cf", str(plain), "."], check=True)  # noqa: S607
            with plain.open("rb") as file:
                os.fsync(file.fileno())
            seconds["tar"].append(time.perf_counter() - began)
            plain.unlink()
            (directory / "archives" / "benchmark" / f"{number}.tar").unlink()
    finally:
        provider.delete(resource_id, within=60)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return {
        "mib": round(size / _MIB, 1),
        "files": small + max(1, mib // 64),
        "median_seconds": {way: round(one, 3) for way, one in medians.items()},
        "mib_per_second": {way: round(size / _MIB / one, 1) for way, one in medians.items()},
        "saved_takes_times_tar": round(medians["saved"] / medians["tar"], 2),
    }


if __name__ == "__main__":
    main()
