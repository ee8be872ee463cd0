"""Writes tests/golden/rope.json: what transformers makes of config.json files.

For each configuration: the attributes of the configuration class, each block's sliding window, the
inverse frequencies as bits of float32 and the scale of cos and sin. Made with transformers 5.24 and
torch 2 on the CPU:

    python tests/golden/make_rope.py
"""

import json
import pathlib

import torch
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

ROTARY = {
    "llama": LlamaRotaryEmbedding,
    "mistral": MistralRotaryEmbedding,
    "qwen2": Qwen2RotaryEmbedding,
    "qwen3": Qwen3RotaryEmbedding,
}
HERE = pathlib.Path(__file__).parent
DIMENSIONS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "vocab_size": 1000,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def cases():
    for family in ROTARY:
        yield {"model_type": family}
    llama = {"model_type": "llama", "head_dim": 128}
    yield {**llama, "num_key_value_heads": None, "eos_token_id": None, "bos_token_id": None}
    yield {**llama, "attention_bias": True, "tie_word_embeddings": True}
    yield {**llama, "rope_theta": 500000.0, "max_position_embeddings": 131072, "rope_scaling": LLAMA3}
    yield {
        **llama,
        "head_dim": 64,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {**LLAMA3, "factor": 32.0},
    }
    yield {**llama, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}, "rope_theta": 7.0}
    yield {**llama, "rope_scaling": {"type": "linear", "factor": 3.0}}
    yield {**llama, "rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}}
    yield {
        **llama,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }
    yield {**llama, "rope_theta": 5e5, "rope_scaling": {}, "rope_parameters": {"rope_type": "default"}}
    yield {**llama, "rope_theta": 100000.0, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}
    qwen2 = {"model_type": "qwen2", "head_dim": 128, "rope_theta": 1e6}
    yield {**qwen2, "rope_scaling": YARN}
    yield {**qwen2, "rope_scaling": {**YARN, "truncate": False}}
    yield {**qwen2, "rope_scaling": {**YARN, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2}}
    yield {**qwen2, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 0}}
    yield {**qwen2, "rope_scaling": {**YARN, "factor": None}, "max_position_embeddings": 65536}
    yield {**qwen2, "rope_scaling": {"type": "yarn", "factor": 1.0}, "max_position_embeddings": 4096}
    yield {**qwen2, "rope_scaling": YARN, "original_max_position_embeddings": 4096}
    for family in ("qwen2", "qwen3"):
        qwen = {"model_type": family}
        yield {**qwen, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 77}
        yield {**qwen, "use_sliding_window": True}
        yield {**qwen, "use_sliding_window": True, "max_window_layers": 0}
        yield {**qwen, "use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}
        yield {**qwen, "sliding_window": 5, "max_window_layers": 0}
        types = ["full_attention", "sliding_attention"] * 2
        yield {**qwen, "use_sliding_window": True, "sliding_window": 9, "layer_types": types}
    yield {"model_type": "qwen3", "head_dim": 64, "attention_bias": True}
    yield {"model_type": "mistral", "sliding_window": None}
    yield {"model_type": "mistral", "sliding_window": 11, "head_dim": 96}


def golden(case):
    config = CONFIG_MAPPING[case["model_type"]](**json.loads(json.dumps(case)))
    rotary = ROTARY[case["model_type"]](config)
    sliding = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None or case["model_type"] in ("llama", "mistral"):
        windows = [sliding if case["model_type"] == "mistral" else None] * config.num_hidden_layers
    else:
        windows = [sliding if t == "sliding_attention" else None for t in types]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "config": case,
        "head_dim": head_dim,
        "kv_heads": config.num_key_value_heads,
        "windows": windows,
        "tied": config.tie_word_embeddings,
        "eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "max_positions": config.max_position_embeddings,
        "bos": config.bos_token_id,
        "eos": config.eos_token_id,
        "attention_bias": getattr(config, "attention_bias", False),
        "inv_freq_bits": rotary.inv_freq.to(torch.float32).view(torch.int32).tolist(),
        "attention_scaling": rotary.attention_scaling,
    }


goldens = [golden({**DIMENSIONS, **case}) for case in cases()]
text = ",\n".join(json.dumps(golden) for golden in goldens)
(HERE / "rope.json").write_text(f"[\n{text}\n]\n")
