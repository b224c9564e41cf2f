"""Chat data: prompts, templates, token pipelines."""

import logging

# transformers, once it is imported, misses PyTorch, which nothing here wants; all else that it says is heard.
logging.getLogger("transformers").addFilter(lambda record: not str(record.msg).startswith("PyTorch was not found"))
