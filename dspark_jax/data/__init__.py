"""Chat data: prompts, templates, token pipelines."""
