"""How fast transformers and PyTorch train on a CPU in float32: the rival of Terrace's CPU device.

    python benches/reference/torch_cpu.py MODEL_DIR [--seq-len 1024] [--micro-batch 1] ...

One whole step: forward, backward, clipping to norm 1, AdamW (decay on tensors of rank >= 2), on
random token ids without padding. Every choice of --checkpointing and --attention is measured and
gives one JSON line; tokens per second are of the median step after the warm-up. AdamW is the
fastest of PyTorch's fused, foreach and for-loop forms on this machine, found first.
`light_seconds` is the step's arithmetic (6 * parameters + attention, times tokens; what
checkpointing repeats not counted) at the rate of a large float32 matrix product, measured here.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import time

import torch
import transformers
from transformers import AutoModelForCausalLM

FORMS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="directory in Hugging Face's layout")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1, help="accumulated before a step")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not counted")
    parser.add_argument("--threads", type=int, default=0, help="0: PyTorch's choice")
    parser.add_argument("--attention", nargs="+", default=["sdpa"], choices=["sdpa", "eager"])
    parser.add_argument("--checkpointing", nargs="+", default=["off", "on"], choices=["off", "on"])
    parser.add_argument("--optimizer", default="fastest", choices=["fastest", *FORMS])
    return parser.parse_args()


def adamw(model, form):
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-6, **FORMS[form])


def seconds(work, count):
    out = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        out.append(time.perf_counter() - start)
    return statistics.median(out)


def fastest_form(model):
    """Median seconds of each form's update on zero gradients; states are made in a first call."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    timings = {}
    for form in FORMS:
        optimizer = adamw(model, form)
        optimizer.step()
        timings[form] = seconds(optimizer.step, 5)
    for p in model.parameters():
        p.grad = None
    return min(timings, key=timings.get), timings


def matmul_rate():
    """FLOPS of a float32 matrix product that is larger than the caches."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    torch.mm(a, b)
    return 2 * 2048**3 / seconds(lambda: torch.mm(a, b), 9)


def measure(model, options, form, attention, checkpointing):
    model.set_attn_implementation(attention)
    if checkpointing == "on":
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.activation_checkpointing_disable()
    model.train()
    optimizer = adamw(model, form)
    generator = torch.Generator().manual_seed(1)
    shape = (options.micro_batches, options.micro_batch, options.seq_len)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=generator)
    losses, steps, updates = [], [], []
    for step in range(options.warmup + options.steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for micro in ids:
            part = model(input_ids=micro, labels=micro, use_cache=False).loss / len(ids)
            part.backward()
            loss += part.item()
        before_update = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        end = time.perf_counter()
        losses.append(loss)
        if step >= options.warmup:
            steps.append(end - start)
            updates.append(end - before_update)
    return ids.numel(), losses, steps, updates


def forget_peak():
    """Starts the peak of resident memory anew, where /proc allows it."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def peak_resident_bytes():
    """Of the process since `forget_peak`, or since its start; 0 where /proc is not there."""
    try:
        lines = open("/proc/self/status").read().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM")), 0)


def main():
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Causal attention: half of two products of seq_len * heads * head_dim, thrice (forward, twice
    # backward), two operations a multiply-add.
    width = config.num_attention_heads * head_dim
    attention_flops = 6 * config.num_hidden_layers * options.seq_len * width
    form, form_seconds = fastest_form(model)
    if options.optimizer != "fastest":
        form = options.optimizer
    rate = matmul_rate()
    for attention, checkpointing in itertools.product(options.attention, options.checkpointing):
        forget_peak()
        tokens, losses, steps, updates = measure(model, options, form, attention, checkpointing)
        median = statistics.median(steps)
        light = tokens * (6 * parameters + attention_flops) / rate
        print(json.dumps({
            "bench": "torch_cpu", "model": os.path.basename(os.path.normpath(options.model)),
            "parameters": parameters, "dtype": "float32", "attention": attention,
            "checkpointing": checkpointing, "seq_len": options.seq_len,
            "micro_batch": options.micro_batch, "micro_batches": options.micro_batches,
            "optimizer": form, "optimizer_seconds": form_seconds,
            "tokens_per_second": tokens / median, "step_seconds": median,
            "step_seconds_all": steps, "clip_and_update_seconds": statistics.median(updates),
            "model_flops": tokens * (6 * parameters + attention_flops) / median,
            "matmul_flops": rate, "light_seconds": light, "percent_of_light": 100 * light / median,
            "first_loss": losses[0], "last_loss": losses[-1],
            "peak_resident_bytes": peak_resident_bytes(),
            "threads": torch.get_num_threads(), "cpu_count": os.cpu_count(),
            "load_average": os.getloadavg()[0], "machine": platform.machine(),
            "torch": torch.__version__, "transformers": transformers.__version__,
            "python": platform.python_version(),
        }), flush=True)


if __name__ == "__main__":
    main()
