"""Loads an exported directory with transformers, and compares it with another if one is named.

    python tests/golden/check_transformers.py DIR [--against DIR2] [--tolerance 0]

Prints a digest of the logits on a fixed prompt and the greedy continuation. With --against it also
compares tensors by name, shape and value, logits, ids of a probe text and the chat template, and
exits with 1 if any differ (numbers: by more than --tolerance). A directory without a tokenizer is
given fixed token ids. Files are loaded strictly: a missing or unexpected tensor is a failure.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "The capital of France is"
PROBE = "Hello wörld! 你好 12345\n\n  def f(x):\treturn x**2"
NEW_TOKENS = 20


def load(folder):
    """The model in float32, and the tokenizer or None."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            sys.exit(f"{folder}: {kind} {sorted(report[kind])}")
    files = ("tokenizer.json", "tokenizer.model")
    if any((Path(folder) / name).exists() for name in files):
        return model.eval(), AutoTokenizer.from_pretrained(folder)
    return model.eval(), None


@torch.no_grad()
def describe(folder):
    """What is printed, and what is compared."""
    model, tokenizer = load(folder)
    vocab = model.config.vocab_size
    if tokenizer is None:
        ids = [(7 * i + 3) % vocab for i in range(8)]
    else:
        ids = tokenizer(PROMPT, add_special_tokens=False).input_ids
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    greedy, gap = list(ids), float("inf")
    for _ in range(NEW_TOKENS):
        last = model(input_ids=torch.tensor([greedy])).logits[0, -1]
        best = last.topk(2).values
        gap = min(gap, (best[0] - best[1]).item())
        greedy.append(int(last.argmax()))
    shown = {
        "dir": str(folder), "class": type(model).__name__, "ids": ids,
        "logits_sha256": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        "logits_mean": logits.double().mean().item(), "logits_max": logits.max().item(),
        "greedy": greedy[len(ids):], "smallest_gap": gap,
    }
    compared = {"logits": logits, "tensors": model.state_dict(), "config": model.config.to_dict()}
    if tokenizer is not None:
        shown["text"] = tokenizer.decode(greedy[len(ids):])
        compared["probe"] = tokenizer(PROBE).input_ids
        compared["template"] = tokenizer.chat_template
    return shown, compared


def differences(a, b, tolerance):
    """Lines that say what differs; config.json's spelling and dtype may."""
    lines = []
    left, right = a["tensors"], b["tensors"]
    for name in sorted(left.keys() ^ right.keys()):
        lines.append(f"only one has {name}")
    for name in sorted(left.keys() & right.keys()):
        if left[name].shape != right[name].shape:
            lines.append(f"{name}: {list(left[name].shape)} and {list(right[name].shape)}")
        elif (worst := (left[name] - right[name]).abs().max().item()) > tolerance:
            lines.append(f"{name}: values differ by up to {worst:g}")
    if a["logits"].shape != b["logits"].shape:
        lines.append("logits: shapes differ")
    elif (worst := (a["logits"] - b["logits"]).abs().max().item()) > tolerance:
        lines.append(f"logits: differ by up to {worst:g}")
    skipped = {"dtype", "transformers_version", "_name_or_path", "use_cache"}
    for key in sorted((a["config"].keys() | b["config"].keys()) - skipped):
        if a["config"].get(key) != b["config"].get(key):
            lines.append(f"config {key}: {a['config'].get(key)} and {b['config'].get(key)}")
    for key in ("probe", "template"):
        if a.get(key) != b.get(key):
            lines.append(f"tokenizer: {key} differs")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dir")
    parser.add_argument("--against", help="a second directory to compare with")
    parser.add_argument("--tolerance", type=float, default=0.0, help="of tensors and logits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shown, compared = describe(options.dir)
    print(json.dumps(shown, ensure_ascii=False))
    if options.against:
        other_shown, other = describe(options.against)
        print(json.dumps(other_shown, ensure_ascii=False))
        lines = differences(compared, other, options.tolerance)
        print("\n".join(lines) if lines else "equal")
        sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
