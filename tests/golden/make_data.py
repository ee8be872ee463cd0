"""Writes tests/fixtures/data/golden.json: ids and loss masks of the fixture rows by transformers.

    python3 tests/golden/make_data.py [MATERIAL]        (transformers 5.24.0, tokenizers 0.23)

Cases "quickstart", "smollm2", "qwen3", "llama3" and "mistral" are chat templates with the
quickstart tokenizer. A file of which a template refuses a row is left out of its case.
With MATERIAL, a folder that holds smollm2-135m-instruct/ and qwen3-tokenizer/, also
"smollm2-own" and "qwen3-own": the same templates with the models' own tokenizers.

The mask is made without Terrace's method: the first three templates write an assistant turn
between "<|im_start|>assistant\n" and "<|im_end|>\n", Mistral's between "[/INST]" and the end of the
text, and no fixture row contains those. That of "llama3" marks its answers, and transformers makes
the mask of that.
"""

import json
import pathlib
import re
import sys

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = ROOT / "tests/fixtures/data"
QUICKSTART = ROOT / "src/data/quickstart"
TEMPLATES = ["smollm2", "qwen3", "llama3", "mistral"]
FILES = ["identity.json", "sharegpt.json", "messages.jsonl", "parts.jsonl", "thinking.jsonl", "questions.jsonl"]
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}


SPANS = {
    "im_start": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)",
    "[INST]": r"\[/INST\](.*?<\|endoftext\|>)",
}


def fnv(numbers):
    """FNV-1a, 64 bits, over little-endian u32."""
    value = 0xCBF29CE484222325
    for number in numbers:
        for byte in number.to_bytes(4, "little"):
            value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def read(name):
    text = (ROWS / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]


def conversation(row, calls):
    """A row as (messages, tools) of transformers; `calls`: the template writes tool calls."""
    if "instruction" in row:
        asked = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}], None
    if "question" in row:
        return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}], None
    if "conversations" in row:
        messages = []
        for turn in row["conversations"]:
            message = {"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}
            if turn["from"] == "function_call" and calls:
                call = json.loads(turn["value"])
                message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
            messages.append(message)
        tools = json.loads(row["tools"] or "[]")
        return messages, [{"type": "function", "function": tool} for tool in tools] or None
    messages = []
    for message in row["messages"]:
        message = dict(message)
        message.pop("loss_weight", None)
        if isinstance(message["content"], list):
            message["content"] = "".join(part["value"] for part in message["content"])
        messages.append(message)
    return messages, row.get("tools")


def sample(tokenizer, template, row):
    messages, tools = conversation(row, "tool_calls" in template)
    options = {"tools": tools, "chat_template": template}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert encoded["input_ids"] == ids
    if re.search(r"{%-?\s*generation\s*-?%}", template):
        marked = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        return text, ids, [int(mark) for mark in marked["assistant_masks"]]
    pattern = next(pattern for mark, pattern in SPANS.items() if mark in template)
    spans = [m.span(1) for m in re.finditer(pattern, text, re.S)]
    assert len(spans) == sum(message["role"] == "assistant" for message in messages)
    starts = [start for start, _ in encoded["offset_mapping"]]
    mask = [int(any(begin <= start < end for begin, end in spans)) for start in starts]
    return text, ids, mask


def case(tokenizer, template):
    files = {}
    for name in FILES:
        rows = []
        for index, row in enumerate(read(name)):
            try:
                text, ids, mask = sample(tokenizer, template, row)
            except TemplateError:
                rows = None
                break
            golden = {"count": len(ids), "trained": sum(mask), "ids": fnv(ids), "mask": fnv(mask)}
            if index == 0:
                golden["full"] = {"text": text, "ids": ids, "mask": "".join(map(str, mask))}
            rows.append(golden)
        if rows is not None:
            files[name] = rows
    return files


def main():
    quickstart = AutoTokenizer.from_pretrained(QUICKSTART)
    templates = {name: (ROWS / f"{name}.jinja").read_text(encoding="utf-8") for name in TEMPLATES}
    cases = {"quickstart": case(quickstart, quickstart.chat_template)}
    for name, template in templates.items():
        cases[name] = case(quickstart, template)
    if len(sys.argv) > 1:
        material = pathlib.Path(sys.argv[1])
        for name, folder in (("smollm2", "smollm2-135m-instruct"), ("qwen3", "qwen3-tokenizer")):
            tokenizer = AutoTokenizer.from_pretrained(material / folder)
            assert tokenizer.chat_template.strip() == templates[name].strip()
            cases[name + "-own"] = case(tokenizer, tokenizer.chat_template)
    with open(ROWS / "golden.json", "w", encoding="utf-8") as out:
        json.dump(cases, out, ensure_ascii=False, separators=(",", ":"))
        out.write("\n")


main()
