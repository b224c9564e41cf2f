"""`python -m dspark_jax VERB`: the `dspark` command where the console script is not on the path."""

import sys

from dspark_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
