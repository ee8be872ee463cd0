"""Writes adamw.json: ten steps of torch.optim.AdamW in f32, for tests of the optimizer.

Arrays are f32 bits in hexadecimal, eight digits an element; element i of the second half is not
decayed. Run with torch 2.15: python tests/golden/make_adamw.py
"""
import json
import pathlib
import struct

import torch

COUNT = 48
STEPS = 10
SETTINGS = {"rate": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
EXTREMES = [0.0, -0.0, 1e-45, -3e-42, 1.2e-38, 1e-30, 1e-12, -1e12, 3e18, -1e30, 1.0, -1.0]


def bits(tensor):
    values = tensor.detach().flatten().tolist()
    return "".join(struct.pack(">f", value).hex() for value in values)


generator = torch.Generator().manual_seed(7)
weight = torch.randn(COUNT, generator=generator) * 0.05
weight[:12] = torch.tensor(EXTREMES)
weight[24:30] = 0.0
halves = [weight[: COUNT // 2].clone(), weight[COUNT // 2 :].clone()]
for half in halves:
    half.requires_grad_(True)
optimizer = torch.optim.AdamW(
    [
        {"params": [halves[0]], "weight_decay": SETTINGS["weight_decay"]},
        {"params": [halves[1]], "weight_decay": 0.0},
    ],
    lr=SETTINGS["rate"],
    betas=tuple(SETTINGS["betas"]),
    eps=SETTINGS["eps"],
    foreach=False,
    fused=False,
)
steps = []
for _ in range(STEPS):
    gradient = torch.randn(COUNT, generator=generator)
    gradient *= 10.0 ** torch.randint(-6, 3, (COUNT,), generator=generator)
    order = torch.randperm(COUNT, generator=generator)[: len(EXTREMES)]
    gradient[order] = torch.tensor(EXTREMES)
    halves[0].grad, halves[1].grad = gradient[: COUNT // 2].clone(), gradient[COUNT // 2 :].clone()
    optimizer.step()
    state = [optimizer.state[half] for half in halves]
    steps.append(
        {
            "gradient": bits(gradient),
            "weight": bits(torch.cat(halves)),
            "moment1": bits(torch.cat([s["exp_avg"] for s in state])),
            "moment2": bits(torch.cat([s["exp_avg_sq"] for s in state])),
        }
    )
golden = {"torch": torch.__version__, "weight": bits(weight), **SETTINGS, "steps": steps}
path = pathlib.Path(__file__).parent / "adamw.json"
path.write_text(json.dumps(golden, indent=0) + "\n")
