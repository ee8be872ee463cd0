"""Writes rate.json: learning rates by transformers' schedules, for tests of optimizer::rate.

Run with transformers 5.24 and torch: python tests/golden/make_rate.py
"""
import json
import pathlib

import torch
import transformers
from transformers import optimization

PEAK = 3e-4
TOTAL = 23


def rates(schedule, warmup, floor):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    if schedule == "constant":
        made = optimization.get_constant_schedule_with_warmup(optimizer, warmup)
    elif schedule == "linear":
        made = optimization.get_linear_schedule_with_warmup(optimizer, warmup, TOTAL)
    elif schedule == "cosine" and floor == 0:
        made = optimization.get_cosine_schedule_with_warmup(optimizer, warmup, TOTAL)
    elif schedule == "cosine":
        made = optimization.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, TOTAL, min_lr=floor
        )
    else:
        made = optimization.get_wsd_schedule(
            optimizer, warmup, TOTAL // 10, TOTAL, decay_type="linear", min_lr_ratio=floor / PEAK
        )
    values = []
    for _ in range(TOTAL + 1):
        values.append(made.get_last_lr()[0])
        optimizer.step()
        made.step()
    if schedule == "wsd" and floor:
        # Its warm-up starts from the floor; Terrace's always from 0.
        values[:warmup] = [PEAK * (step / warmup) for step in range(warmup)]
    return values


cases = [
    {"schedule": s, "warmup": w, "floor": f, "rates": rates(s, w, f)}
    for s, w, f in [
        ("constant", 0, 0.0),
        ("constant", 5, 0.0),
        ("linear", 0, 0.0),
        ("linear", 5, 0.0),
        ("cosine", 0, 0.0),
        ("cosine", 5, 0.0),
        ("cosine", 5, 3e-5),
        ("wsd", 0, 0.0),
        ("wsd", 5, 0.0),
        ("wsd", 5, 3e-5),
        ("linear", 23, 0.0),
    ]
]
golden = {"transformers": transformers.__version__, "peak": PEAK, "total": TOTAL, "cases": cases}
path = pathlib.Path(__file__).parent / "rate.json"
path.write_text(json.dumps(golden).replace('{"schedule"', '\n{"schedule"') + "\n")
