"""A model directory that verbs can load."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}a:"


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory, golden):
    """llama_tiny with a tokenizer of single bytes."""
    directory = tmp_path_factory.mktemp("chat") / "llama_tiny"
    shutil.copytree(golden / "targets" / "llama_tiny", directory)
    pieces = ["<pad>", "<eos>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
