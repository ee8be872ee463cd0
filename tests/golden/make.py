"""Writes the goldens: tiny random models, and what transformers and PyTorch compute from them.

    python tests/golden/make.py [DIR]        (DIR defaults to this folder)

For each case DIR/<case>/ gets config.json and model.safetensors (float32, as save_pretrained
writes them), golden.safetensors and golden.json; training cases also golden_steps.safetensors.
DIR/manifest.json has versions, seeds, shapes and SHA-256 sums. The same versions on the same kind
of processor give the same bytes. README.md says what each key means.

What the references are:
- Each sequence runs on its own, so positions start at 0 and nothing attends across sequences.
- f64: weights, activations, norms, softmax and loss in float64. transformers would do RMSNorm and
  the softmax of eager attention in float32 even in a float64 model; both are replaced here. Only
  the rotary tables (cos, sin) stay what transformers computes in float32, then widened.
- f32: transformers as it is, float32, eager attention; "sdpa" is the same with
  scaled_dot_product_attention, a second sample of float32's own error.
- The loss of a step is the sum over its unmasked targets divided by their number in the whole step.
- bf16: see `train_bf16`.
"""

import copy
import hashlib
import json
import math
import sys
import types
from pathlib import Path

import safetensors
import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import (
    LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config,
    Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM,
)

BASE = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    "initializer_range": 0.02, "rms_norm_eps": 1e-5, "use_cache": False,
}
QWEN = {"rms_norm_eps": 1e-6, "bos_token_id": None}

# name: (config class, model class, settings over BASE, sequence lengths by micro-batch, clipping
# norm of the ten steps, or None where the case has no training)
CASES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }, [[13, 1, 7], [22], [5, 9, 3, 2]], None),
    "llama31": (LlamaConfig, LlamaForCausalLM, {
        "num_hidden_layers": 3, "tie_word_embeddings": True, "head_dim": 16,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    }, [[59, 4], [31]], 7.0),
    "llama_linear": (LlamaConfig, LlamaForCausalLM, {
        "head_dim": 16, "vocab_size": 97,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0},
    }, [[26, 11], [17, 6]], None),
    "llama_bias": (LlamaConfig, LlamaForCausalLM, {
        "head_dim": 16, "attention_bias": True, "vocab_size": 97,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }, [[12, 19], [8]], None),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {
        **QWEN, "tie_word_embeddings": True, "vocab_size": 103,
        # A large base would leave the gradient of k's bias almost zero where heads hardly rotate,
        # and AdamW would turn its rounding errors into whole steps.
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }, [[14, 10], [29], [3, 5]], 5.5),
    "qwen2_window": (Qwen2Config, Qwen2ForCausalLM, {
        **QWEN, "tie_word_embeddings": True, "vocab_size": 97, "use_sliding_window": True,
        "sliding_window": 6, "max_window_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }, [[23, 9], [15]], None),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {
        **QWEN, "head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }, [[16, 8], [27], [4, 6]], 4.8),
    "mistral": (MistralConfig, MistralForCausalLM, {
        "head_dim": 16, "sliding_window": 7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }, [[33, 5], [21]], None),
    "yarn": (Qwen2Config, Qwen2ForCausalLM, {
        **QWEN, "tie_word_embeddings": True, "vocab_size": 97, "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 64,
        },
    }, [[45, 7], [18]], None),
}

# Seeds under which float32 stays close to float64 for ten steps, so that the goldens are sharp.
SEED = 3
STEPS, WARMUP, PEAK = 10, 2, 1e-2
BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.1
IGNORE = -100


def randomise(model, generator):
    """Every tensor is random: no norm is 1, no bias 0, and losses and gradients are not trivial.

    Each 16th element lies halfway between two bf16 numbers, so that rules for ties differ.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim >= 2:
                weight.copy_(0.2 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(1.0 + 0.25 * noise)
            bits = weight.view(-1).view(torch.int32)
            bits[::16] = (bits[::16] & -0x10000) | 0x8000


def sequence(length, vocab, generator, masked=False):
    """Token ids, labels (aligned with them, as Hugging Face has it) and targets (shifted)."""
    tokens = torch.randint(0, vocab, (length,), generator=generator).tolist()
    drop = torch.rand(length, generator=generator) < 0.25
    labels = [IGNORE if masked or d else t for t, d in zip(tokens, drop.tolist())]
    return {"tokens": tokens, "labels": labels, "targets": labels[1:] + [IGNORE]}


def step_data(step, vocab, generator):
    """Three micro-batches of unequal token counts; one of step 4 is masked altogether."""
    micro_batches = []
    for micro in range(3):
        lengths = torch.randint(3, 12, (1 + (step + micro) % 3,), generator=generator).tolist()
        masked = step == 4 and micro == 1
        micro_batches.append([sequence(n, vocab, generator, masked) for n in lengths])
    return micro_batches


def rates():
    """Linear from 0 over the warm-up, then half a cosine to 0."""
    out = []
    for step in range(STEPS):
        if step < WARMUP:
            out.append(PEAK * step / WARMUP)
        else:
            done = (step - WARMUP) / (STEPS - WARMUP)
            out.append(PEAK * 0.5 * (1.0 + math.cos(math.pi * done)))
    return out


def exact_rmsnorm(self, hidden):
    inverse = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (hidden * inverse)


def exact_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """Eager attention whose softmax stays in the dtype of the scores."""
    groups = module.num_key_value_groups
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling + attention_mask
    out = torch.softmax(scores, dim=-1) @ value
    return out.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("exact", exact_attention)
transformers.AttentionMaskInterface.register(
    "exact", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def variant(model, kind):
    """A copy of the model that computes as `kind`: f64, f32 or sdpa."""
    model = copy.deepcopy(model)
    model.set_attn_implementation({"f64": "exact", "f32": "eager", "sdpa": "sdpa"}[kind])
    if kind == "f64":
        model.double()
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = types.MethodType(exact_rmsnorm, module)
    return model.train()


def forward(model, sequence_):
    """Logits [T, V] and per-token losses [T], 0 where a token has no target."""
    logits = model(input_ids=torch.tensor([sequence_["tokens"]]), use_cache=False).logits[0]
    targets = torch.tensor(sequence_["targets"])
    return logits, cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")


def target_count(micro_batches):
    return sum(t != IGNORE for m in micro_batches for s in m for t in s["targets"])


def accumulate(model, micro_batches):
    """Gradients of the step's mean loss into .grad; the loss, and each sequence's results."""
    count = target_count(micro_batches)
    total, results = 0.0, []
    for micro in micro_batches:
        results.append([forward(model, s) for s in micro])
        loss = sum(losses.sum() for _, losses in results[-1])
        (loss / count).backward()
        total += loss.item()
    return total / count, results


def gradient_norm(parameters):
    """As clip_grad_norm_ computes it, in the gradients' dtype."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters]).item()


def errors(exact, coarse):
    """How far a float32 result is from the float64 one."""
    difference = (coarse.double() - exact.double())
    figures = {
        "max_abs": difference.abs().max().item(),
        "l2": difference.norm().item(),
        "reference_max_abs": exact.abs().max().item(),
        "reference_l2": exact.double().norm().item(),
    }
    return {name: float(f"{figure:.3g}") for name, figure in figures.items()}


def once(model, micro_batches):
    """One forward and backward in each arithmetic: tensors, and what goes into the JSON."""
    tensors, record = {}, {"micro_batches": micro_batches, "targets": target_count(micro_batches)}
    runs = {}
    for kind in ("f64", "f32", "sdpa"):
        run = variant(model, kind)
        loss, results = accumulate(run, micro_batches)
        record.setdefault("loss", {})[kind] = loss
        record.setdefault("gradient_norm", {})[kind] = gradient_norm(list(run.parameters()))
        runs[kind] = (dict(run.named_parameters()), results)
    record["logits_error"], record["gradient_error"] = {}, {}
    for m, micro in enumerate(micro_batches):
        for s in range(len(micro)):
            (exact, losses), (coarse, coarse_losses) = (runs[k][1][m][s] for k in ("f64", "f32"))
            key = f"{m}.{s}"
            tensors[f"logits.{key}"] = exact.detach().float()
            tensors[f"losses.{key}"] = losses.detach()
            tensors[f"losses_f32.{key}"] = coarse_losses.detach()
            record["logits_error"][key] = errors(exact.detach(), coarse.detach())
    for name, parameter in runs["f64"][0].items():
        tensors[f"gradient.{name}"] = parameter.grad.float()
        record["gradient_error"][name] = errors(parameter.grad, runs["f32"][0][name].grad)
    return tensors, record


def adamw(named):
    """torch.optim.AdamW, decay only on tensors of rank >= 2; plain loops, so order is fixed."""
    decayed = [p for _, p in named if p.ndim >= 2]
    others = [p for _, p in named if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=PEAK, betas=BETAS, eps=EPS, foreach=False, fused=False)


def train(model, kind, steps, max_norm):
    """Ten steps in one arithmetic: losses, norms before clipping, final weights."""
    run = variant(model, kind)
    named = list(run.named_parameters())
    optimizer = adamw(named)
    losses, norms = [], []
    for micro_batches, rate in zip(steps, rates()):
        optimizer.zero_grad(set_to_none=True)
        losses.append(accumulate(run, micro_batches)[0])
        norms.append(torch.nn.utils.clip_grad_norm_(run.parameters(), max_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return losses, norms, {name: p.detach() for name, p in named}


def nearest_away(x):
    """float32 to the bf16 number that is nearest, ties away from zero, as float32."""
    return ((x.contiguous().view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)


def train_bf16(model, kind, steps, max_norm):
    """Ten steps with bf16 weights, an exact float32 master and bf16 gradients.

    Forward and backward see the master rounded by `nearest_away`, and compute in `kind`. Gradients
    accumulate over the step in that arithmetic; the norm is taken from them, in float64; then they
    are rounded to float32 and to bf16 (nearest, ties to even). The clipping coefficient
    min(1, max_norm / (norm + 1e-6)), a float32, multiplies the rounded gradient. AdamW works on the
    master in float32 under either `kind`.
    """
    run = variant(model, kind)
    named = list(run.named_parameters())
    master = {name: torch.nn.Parameter(p.detach().float().clone()) for name, p in named}
    optimizer = adamw(list(master.items()))
    losses, norms = [], []
    for micro_batches, rate in zip(steps, rates()):
        run.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, p in named:
                p.copy_(nearest_away(master[name].detach()))
        losses.append(accumulate(run, micro_batches)[0])
        norm = math.sqrt(sum(p.grad.double().pow(2).sum().item() for _, p in named))
        norms.append(norm)
        coefficient = torch.tensor(min(1.0, max_norm / (norm + 1e-6)), dtype=torch.float32)
        for name, p in named:
            master[name].grad = p.grad.float().bfloat16().float() * coefficient
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return losses, norms, {name: p.detach() for name, p in master.items()}


def envelope(exact, *coarse):
    """Largest distance so far from the float64 run, over the float32 runs: one figure a step."""
    out, worst = [], 0.0
    for step, value in enumerate(exact):
        worst = max(worst, *(abs(run[step] - value) for run in coarse))
        out.append(worst)
    return out


def ten_steps(model, vocab, max_norm, generator):
    """The training record of a case: tensors, and what goes into the JSON."""
    steps = [step_data(step, vocab, generator) for step in range(STEPS)]
    f64 = train(model, "f64", steps, max_norm)
    f32 = train(model, "f32", steps, max_norm)
    sdpa = train(model, "sdpa", steps, max_norm)
    bf16_f64 = train_bf16(model, "f64", steps, max_norm)
    bf16 = train_bf16(model, "f32", steps, max_norm)
    bf16_sdpa = train_bf16(model, "sdpa", steps, max_norm)
    for norms in (f64[1], bf16[1]):
        clipped = [norm > max_norm for norm in norms]
        assert any(clipped) and not all(clipped), f"max_norm {max_norm} against {norms}"
    tensors, weight_error, master_error = {}, {}, {}
    for name in f64[2]:
        tensors[f"weight.{name}"] = f64[2][name].float()
        tensors[f"bf16_master.{name}"] = bf16[2][name]
        weight_error[name] = errors(f64[2][name], f32[2][name])
        master_error[name] = errors(bf16_f64[2][name], bf16[2][name])
    named_runs = {
        "f64": f64, "f32": f32, "sdpa": sdpa,
        "bf16_f64": bf16_f64, "bf16_f32": bf16, "bf16_sdpa": bf16_sdpa,
    }
    record = {
        "optimizer": {
            "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "decayed": "rank >= 2",
            "max_grad_norm": max_norm, "clip_eps": 1e-6,
        },
        "learning_rates": rates(),
        "steps": [
            {"micro_batches": m, "targets": target_count(m)} for m in steps
        ],
        "loss": {kind: run[0] for kind, run in named_runs.items()},
        "gradient_norm": {kind: run[1] for kind, run in named_runs.items()},
        "loss_error": {
            "fp32": envelope(f64[0], f32[0], sdpa[0]),
            "bf16": envelope(bf16_f64[0], bf16[0], bf16_sdpa[0]),
        },
        "gradient_norm_error": {
            "fp32": envelope(f64[1], f32[1], sdpa[1]),
            "bf16": envelope(bf16_f64[1], bf16[1], bf16_sdpa[1]),
        },
        "weight_error": weight_error,
        "bf16_master_error": master_error,
    }
    return tensors, record


def write_json(path, value):
    """One line a key of the first two levels, so that a change can be read."""
    def lines(item, depth):
        if depth == 0 or not isinstance(item, dict):
            return json.dumps(item, separators=(",", ":"))
        pad = " " * (3 - depth)
        inner = ",\n".join(f"{pad}{json.dumps(k)}: {lines(v, depth - 1)}" for k, v in item.items())
        return "{\n" + inner + "\n" + pad[1:] + "}"
    path.write_text(lines(value, 2) + "\n")


def make_case(name, index, folder):
    """Writes one case; its entry in the manifest."""
    config_class, model_class, settings, lengths, max_norm = CASES[name]
    seed = SEED + index
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    config = config_class(**{**BASE, **settings})
    model = model_class(config).float()
    randomise(model, generator)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)

    vocab = config.vocab_size
    micro_batches = [[sequence(n, vocab, generator) for n in micro] for micro in lengths]
    tensors, once_record = once(model, micro_batches)
    save_file(tensors, folder / "golden.safetensors")
    record = {"case": name, "seed": seed, "forward": once_record}
    if max_norm is not None:
        tensors, record["training"] = ten_steps(model, vocab, max_norm, generator)
        save_file(tensors, folder / "golden_steps.safetensors")
    write_json(folder / "golden.json", record)

    files = sorted(p for p in folder.iterdir() if p.is_file())
    return {
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "shapes": {n: list(p.shape) for n, p in model.named_parameters()},
        "sequences": lengths,
        "files": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files},
    }


def main():
    transformers.utils.logging.disable_progress_bar()
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    manifest = {
        "command": "python tests/golden/make.py tests/golden",
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "cases": {},
    }
    for index, name in enumerate(CASES):
        entry = make_case(name, index, folder / name)
        manifest["cases"][name] = entry
        size = sum(p.stat().st_size for p in (folder / name).iterdir())
        print(f"{name}: {entry['parameters']} parameters, {size} bytes")
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
