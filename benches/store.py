#!/usr/bin/env python3
"""How fast is the store's disk code beside fio, and what does it cost?

fio and terrace-bench take turns within the same minute on the same file, which was written once
before: 4 MiB x 8, direct, io_uring, registered buffers. Both documents go through one parser.
Terrace's arena lies on huge pages, which many drives are faster with; so fio runs twice, with its
own memory and with `--mem=mmaphuge` (as root: the pages are reserved for the while), and counts are
against the faster.

    cargo build --release && python3 benches/store.py DIRECTORY [--rounds 9] [--seconds 2]

Prints measured, fio, percent; CPU of I/O and of checksums, each a percentage of a core at 1 GiB/s.
`cargo bench --bench store -- DIRECTORY` has what needs the store itself: idling, opening, resuming.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

GIB = 1 << 30
ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(tool, file, rw, seconds, size, *more):
    words = [
        tool, f"--name={rw}", f"--filename={file}", f"--rw={rw}", "--bs=4m", "--iodepth=8",
        "--direct=1", "--ioengine=io_uring", "--fixedbufs", f"--size={size}", "--overwrite=1",
        "--time_based", f"--runtime={seconds}", "--output-format=json", *more,
    ]
    out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return parse(json.loads(out))


def parse(document):
    """What a script takes from fio's JSON."""
    job = document["jobs"][0]
    assert job["error"] == 0, job
    sides = [job["read"], job["write"]]
    moved = sum(side["io_bytes"] for side in sides)
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    busy = max(sides, key=lambda side: side["io_bytes"])
    return {
        "rate": sum(side["bw_bytes"] for side in sides),
        "iops": sum(side["iops"] for side in sides),
        "cpu": 100 * cpu_seconds / (moved / GIB),
        "p50": busy["clat_ns"]["percentile"]["50.000000"],
        "p99": busy["clat_ns"]["percentile"]["99.000000"],
        "checksum": 100 * job.get("terrace", {}).get("checksum_seconds", 0) / (moved / GIB),
    }


def reserve(pages):
    """Huge pages of 2 MiB for 8 x 4 MiB and what fio adds; whether they are there."""
    try:
        pages.write_text("40")
    except OSError:
        return False
    return int(pages.read_text()) >= 40


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("directory", type=pathlib.Path)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--seconds", type=float, default=2)
    options.add_argument("--size", default="1g")
    options.add_argument("--bench", default=ROOT / "target/release/terrace-bench")
    options.add_argument("--kinds", default="read,write,rw")
    given = options.parse_args()
    # terrace-bench makes the file; its mark lies behind the bytes that fio uses.
    file = given.directory / "store.bench"
    seconds, size, bench = f"{given.seconds:g}", given.size, str(given.bench)
    found = []
    pages = pathlib.Path("/proc/sys/vm/nr_hugepages")
    before = pages.read_text()
    huge = reserve(pages)
    try:
        # The file is laid out, and both tools are in memory, before anything counts.
        run(bench, file, "read", "1", size, "--unlink=0")
        run("fio", file, "read", "1", size)
        for kind in given.kinds.split(","):
            runs = {"terrace": [], "fio": [], "fio_huge": []}
            turns = [
                ("terrace", bench, ["--unlink=0"]),
                ("fio", "fio", []),
                *([("fio_huge", "fio", ["--mem=mmaphuge"])] if huge else []),
            ]
            for number in range(given.rounds):
                first = number % len(turns)
                for name, tool, more in turns[first:] + turns[:first]:
                    runs[name].append(run(tool, file, kind, seconds, size, *more))
            row = {"kind": kind}
            for name, done in runs.items():
                for key in done[0] if done else []:
                    row[f"{name}_{key}"] = statistics.median(one[key] for one in done)
            fastest = max(row["fio_rate"], row.get("fio_huge_rate", 0))
            row["percent"] = 100 * row["terrace_rate"] / fastest
            found.append(row)
            print(
                f"{kind:9} terrace {row['terrace_rate'] / 1e9:6.3f} GB/s   fio "
                f"{row['fio_rate'] / 1e9:6.3f} GB/s, huge pages "
                f"{row.get('fio_huge_rate', 0) / 1e9:6.3f} GB/s   {row['percent']:5.1f} %   "
                f"cpu {row['terrace_cpu']:5.2f} % of a core a GiB/s, fio {row['fio_cpu']:5.2f} %, "
                f"{row.get('fio_huge_cpu', 0):5.2f} %   "
                f"p99 {row['terrace_p99'] / 1e6:.1f} ms, fio {row['fio_p99'] / 1e6:.1f} ms",
                flush=True,
            )
        sealed = given.directory / "sealed.bench"
        runs = [run(bench, sealed, "read", seconds, size, "--verify=xxh3") for _ in range(3)]
        checksum = statistics.median(one["checksum"] for one in runs)
        print(f"checksum  {checksum:.2f} % of a core a GiB/s")
        print(json.dumps({"rounds": given.rounds, "kinds": found, "checksum": checksum}))
    finally:
        file.unlink(missing_ok=True)
        if huge:
            pages.write_text(before)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(map(str, error.cmd))}: {error.returncode}: {error.stderr.strip()}")
