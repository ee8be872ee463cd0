"""Makes text.txt, tokenizer.json and tokenizer_config.json of the quickstart.

    python3 make_tokenizer.py KJV_TXT        (needs the package tokenizers, 0.23)

KJV_TXT is the whole King James Bible as README.md describes it. The same input gives the same
files, byte for byte.
"""

import json
import pathlib
import sys

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT_BYTES_MAX = 360_000
VOCABULARY = 1024
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}"
    "{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main():
    here = pathlib.Path(__file__).parent
    whole = pathlib.Path(sys.argv[1]).read_text(encoding="ascii")
    # A chapter begins with "Book N": the excerpt ends before the last one that fits.
    text = whole[: whole.rindex("\n\n", 0, TEXT_BYTES_MAX) + 1]
    (here / "text.txt").write_text(text, encoding="ascii")

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.save(str(here / "tokenizer.json"), pretty=False)
    settings = {
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (here / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


main()
