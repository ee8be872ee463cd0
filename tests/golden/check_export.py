"""Loads an exported directory in transformers and checks it.

    python tests/golden/check_export.py DIR [SOURCE]

Every parameter must be found in the files and every tensor of the files used, the configuration
must read the same from both spellings, the logits of a few tokens must be finite, and the tokenizer,
if there is one, must encode and decode. With SOURCE, the directory that was exported from: tensors
that differ and the largest difference of the logits are printed, and the exit status is 1 if any
tensor of equal dtype differs.
"""

import pathlib
import sys

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def load(directory):
    model, loading = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", output_loading_info=True, local_files_only=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not loading.get(kind), f"{kind}: {loading[kind]}"
    return model.eval()


def tensors(directory):
    found = {}
    for path in sorted(pathlib.Path(directory).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}, path
            for name in file.keys():
                assert name not in found, name
                found[name] = file.get_tensor(name)
    return found


def logits(model):
    ids = torch.arange(3, 35).remainder(model.config.vocab_size)[None]
    with torch.no_grad():
        return model(ids).logits.float()


def main(directory, source=None):
    config = AutoConfig.from_pretrained(directory)
    print(config.model_type, config.dtype, config.rope_parameters)
    GenerationConfig.from_pretrained(directory)
    model = load(directory)
    written = tensors(directory)
    print(len(written), "tensors,", sum(t.numel() for t in written.values()), "parameters")
    for name, value in model.state_dict().items():
        if name in written:
            assert torch.equal(value, written[name].to(value.dtype)), name
    ours = logits(model)
    assert torch.isfinite(ours).all()
    if (pathlib.Path(directory) / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert tokenizer.decode(tokenizer("A tile.")["input_ids"], skip_special_tokens=True)
    failed = False
    if source:
        theirs = tensors(source)
        for name, tensor in written.items():
            other = theirs[name]
            assert other.shape == tensor.shape, name
            if other.dtype == tensor.dtype and not torch.equal(other, tensor):
                print("differs:", name, (other.float() - tensor.float()).abs().max().item())
                failed = True
        print("largest difference of logits", (logits(load(source)) - ours).abs().max().item())
    print("different" if failed else "ok")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
