"""Serve a model with speculative decoding behind an OpenAI-compatible API: `python serve.py --port 8000`."""

import sys

from dspark_jax.engine.launch import main

if __name__ == "__main__":
    sys.exit(main())
