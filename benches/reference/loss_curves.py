#!/usr/bin/env python3
"""Do bf16 losses lie on transformers' own?

A model of a config.json with random weights is trained by `terrace train` and by transformers, on
the same rows in the same order, with the same AdamW (fp32 master, bf16 arithmetic, f32 sums,
clipping at 1). transformers runs several times with what does not change the mathematics changed:
how rows are grouped into micro-batches, the attention kernel, and where bf16 begins (autocast over
f32 weights, which keeps the residual stream in f32, or a bf16 copy of the f32 master, as Terrace and
DeepSpeed train). The largest distance of two of its curves is the spread that Terrace's distance
from their mean is held beside; the curves of bf16 copies are also held to Terrace's by themselves.

    python3 benches/reference/loss_curves.py --terrace target/release/terrace --tokens FILE.u16 \\
        --config tests/fixtures/configs/smollm2-135m --steps 100
"""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SEQ_LEN, ROWS = 1024, 8
RATE, WARM_UP, BETAS, EPS, DECAY = 3e-4, 10, (0.9, 0.95), 1e-8, 0.1


def rate(step):
    """Learning rate of a step counted from 0: linear warm-up from 0, then constant."""
    return RATE * min(1.0, step / WARM_UP)


def rows_of(path, count):
    tokens = np.fromfile(path, dtype=np.uint16)
    assert len(tokens) >= count * SEQ_LEN, f"{len(tokens)} tokens, {count * SEQ_LEN} needed"
    return tokens[: count * SEQ_LEN].reshape(count, SEQ_LEN).astype(np.int64)


def transformers_losses(directory, rows, steps, rows_at_once, attention, copied):
    """Losses of `steps` steps; `copied`: the model is a bf16 copy of the f32 master."""
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.bfloat16 if copied else torch.float32,
        attn_implementation=attention,
    ).cuda()
    model.train()
    working = list(model.parameters())
    master = [p.detach().float().requires_grad_() for p in working] if copied else working
    decayed = [p for p in master if p.ndim >= 2]
    others = [p for p in master if p.ndim < 2]
    groups = [dict(params=decayed, weight_decay=DECAY), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS, fused=True)
    targets = ROWS * (SEQ_LEN - 1)
    losses = []
    for step in range(steps):
        batch = torch.from_numpy(rows[step * ROWS : (step + 1) * ROWS]).cuda()
        total = torch.zeros((), dtype=torch.float64, device="cuda")
        for part in batch.split(rows_at_once):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not copied):
                logits = model(part).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
            )
            (loss / targets).backward()
            total += loss.detach()
            if copied:
                for ours, its in zip(master, working):
                    ours.grad = its.grad.float() if ours.grad is None else ours.grad + its.grad
                    its.grad = None
        torch.nn.utils.clip_grad_norm_(master, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if copied:
            with torch.no_grad():
                for ours, its in zip(master, working):
                    its.copy_(ours)
        losses.append(total.item() / targets)
    return losses


def terrace_losses(terrace, directory, rows, steps, device):
    data = directory / "rows.jsonl"
    with open(data, "w") as out:
        for row in rows:
            out.write(json.dumps({"input_ids": row.tolist()}) + "\n")
    run = directory / "run.toml"
    run.write_text(
        f"""
[model]
path = "{directory}"
[data]
train = ["{data}"]
seq_len = {SEQ_LEN}
packing = false
shuffle = false
[train]
steps = {steps}
micro_batch = {ROWS // 2}
micro_batches = 2
learning_rate = {RATE}
schedule = "constant"
warmup_steps = {WARM_UP}
betas = [{BETAS[0]}, {BETAS[1]}]
eps = {EPS}
weight_decay = {DECAY}
max_grad_norm = 1.0
[checkpoint]
every = 0
[log]
dir = "{directory / 'run'}"
"""
    )
    subprocess.run([terrace, "train", run, "--device", device], check=True, stdout=subprocess.DEVNULL)
    losses = []
    for line in open(directory / "run" / "metrics.jsonl"):
        entry = json.loads(line)
        if "loss" in entry and "grad_norm" in entry:
            losses.append(entry["loss"])
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--terrace", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--weights", action="store_true", help="the directory's, not random ones")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows = rows_of(given.tokens, given.steps * ROWS)
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        torch.manual_seed(1)
        if given.weights:
            model = AutoModelForCausalLM.from_pretrained(given.config, dtype=torch.bfloat16)
        else:
            config = AutoConfig.from_pretrained(given.config)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        count = sum(p.numel() for p in model.parameters())
        model.save_pretrained(place)
        del model
        ours = np.array(terrace_losses(given.terrace, place, rows, given.steps, given.device))
        ways = [
            (ROWS, "sdpa", False),
            (ROWS // 2, "eager", False),
            (ROWS, "sdpa", True),
            (ROWS // 2, "sdpa", True),
            (2, "sdpa", True),
            (ROWS // 2, "eager", True),
        ]
        theirs = np.array([transformers_losses(place, rows, given.steps, *way) for way in ways])
    copies = theirs[[copied for _, _, copied in ways]]
    report(given, count, ours, theirs, "all of transformers'")
    report(given, count, ours, copies, "those of bf16 copies")


def report(given, count, ours, theirs, which):
    mean = theirs.mean(axis=0)
    spread = theirs.max(axis=0) - theirs.min(axis=0)
    far = np.abs(ours - mean)
    print(
        f"{given.config}: {count / 1e6:.1f} M parameters, {given.steps} steps of {ROWS} x {SEQ_LEN};"
        f" beside {which}"
    )
    for step in [0, 1, 9, 24, 49, 74, given.steps - 1]:
        print(
            f"  step {step + 1:3}: terrace {ours[step]:.5f}, transformers {mean[step]:.5f}"
            f" (spread {spread[step]:.5f}), apart {far[step]:.5f}"
        )
    print(
        f"  over all steps: apart {far.mean():.5f} on average and {far.max():.5f} at most;"
        f" spread {spread.mean():.5f} and {spread.max():.5f};"
        f" steps inside their range: {np.mean((ours >= theirs.min(0)) & (ours <= theirs.max(0))):.0%}"
    )


if __name__ == "__main__":
    main()
