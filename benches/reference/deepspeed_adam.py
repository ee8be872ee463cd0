"""How fast DeepSpeed's CPUAdam updates float32 parameters: the rival of benches/adamw.rs.

    python benches/reference/deepspeed_adam.py [--parameters N] [--runs 9] [--threads 2]

Parameters, gradients and both moments are float32, one tensor each, 16 bytes a parameter in all: 28
moved an update (16 read, 12 written). AdamW, decay 0.01. The first update warms up and makes the
moments; the rate is of the median of the others. Prints one line of JSON.

CPUAdam is compiled at its first use and needs a C++ compiler and ninja.
"""

import argparse
import json
import os
import statistics
import time

# Read when the libraries start.
parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--parameters", type=int, default=153_419_776, help="of one tensor")
parser.add_argument("--runs", type=int, default=9, help="measured updates")
parser.add_argument("--threads", type=int, default=os.cpu_count())
given = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(given.threads)

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

torch.set_num_threads(given.threads)
parameters = torch.nn.Parameter(torch.full((given.parameters,), 0.5))
parameters.grad = torch.full((given.parameters,), 1e-3)
optimizer = DeepSpeedCPUAdam([parameters], lr=1e-4, weight_decay=0.01, adamw_mode=True)
optimizer.step()
seconds = []
for _ in range(given.runs):
    started = time.perf_counter()
    optimizer.step()
    seconds.append(time.perf_counter() - started)
median = statistics.median(seconds)
assert bool((parameters < 0.5).all()), "every parameter was updated"
print(
    json.dumps(
        {
            "bench": "deepspeed_cpu_adam",
            "deepspeed": deepspeed.__version__,
            "torch": torch.__version__,
            "threads": given.threads,
            "parameters": given.parameters,
            "runs": given.runs,
            "parameters_per_second": round(given.parameters / median),
            "gb_per_second": round(28 * given.parameters / median / 1e9, 3),
        }
    )
)
