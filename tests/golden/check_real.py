"""Loss and gradient norm of one sentence under a real model, to compare Terrace's with.

    python tests/golden/check_real.py MODEL_DIR [--text TEXT] [--dtype float64] [--attention eager]

The loss is the mean next-token cross-entropy in nats, without special tokens added and without
masking; the norm is the global L2 norm over all parameters, a tied embedding once, unclipped.
Norms are summed in float64: PyTorch's own sum over 28 million float32 squares is 4e-5 too low.
float64 widens everything but norms and rotary tables (and eager attention's softmax), which
transformers keeps in float32.
"""

import argparse
import json
import math

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

SENTENCE = "The capital of France is Paris and the capital of Italy is Rome."


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="directory in Hugging Face's layout, with a tokenizer")
    parser.add_argument("--text", default=SENTENCE)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "eager"])
    options = parser.parse_args()

    ids = AutoTokenizer.from_pretrained(options.model)(
        options.text, add_special_tokens=False, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation=options.attention)
    logits = model(input_ids=ids, use_cache=False).logits[0]
    losses = cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    losses.mean().backward()
    norms = {n: p.grad.double().norm().item() for n, p in model.named_parameters()}
    print(json.dumps({
        "ids": ids[0].tolist(),
        "loss": losses.mean().item(),
        "losses": losses.tolist(),
        "gradient_norm": math.hypot(*norms.values()),
        "gradient_norm_torch": torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters()]).item(),
        "embed_gradient_norm": norms["model.embed_tokens.weight"],
        "final_norm_gradient_norm": norms["model.norm.weight"],
        "dtype": options.dtype,
        "attention": options.attention,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }, indent=1))


if __name__ == "__main__":
    main()
