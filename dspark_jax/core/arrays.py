"""Array types of the package and the one key to the dimension letters used in names.

| letter | dimension                    | letter | dimension                          |
| ------ | ---------------------------- | ------ | ---------------------------------- |
| B      | batch: rows, live requests   | H      | query heads                        |
| T      | tokens                       | J      | key/value heads                    |
| S      | cached positions             | C      | head dimension                     |
| A      | anchors                      | V      | vocabulary                         |
| K      | draft block (gamma)          | R      | Markov rank                        |
| N      | verification tokens          | M      | tapped target layers               |
| D      | model width                  | E      | tapped features, M * D             |
| F      | feed-forward width           | L      | layers                             |

N counts the tokens one pass verifies: K + 1 of a row, or those of all rows on one packed axis.
`hidden_BTD` is a [batch, tokens, width] array. Annotations are checked by beartype in tests and erased in production.
"""

from typing import TypeVar, dataclass_transform

import jax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

__all__ = ["Array", "Bool", "DType", "Float", "Int", "Key", "Keys", "Shaped", "pytree"]

Class = TypeVar("Class")

DType = jax.typing.DTypeLike
Keys = Key[Array, "B"]
"""One typed PRNG key for each row of a batch."""


@dataclass_transform(frozen_default=True, field_specifiers=(struct.field,))
def pytree(cls: type[Class]) -> type[Class]:
    """A frozen dataclass that is a pytree of its fields.

    Annotations say what a computation finds in the fields. They go unchecked: jax builds the same tree of shapes,
    shardings or host arrays.
    """
    cls.__no_type_check__ = True
    return struct.dataclass(cls)
