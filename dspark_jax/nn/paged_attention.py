"""How packed tokens are written to pages and attend over them: the ways there are."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dspark_jax.core.arrays import Array, DType, Float, Int
from dspark_jax.kernels import page_write
from dspark_jax.kernels import ragged_verification as kernels
from dspark_jax.nn.block import LayerSpec
from dspark_jax.ops import pages as plain_write
from dspark_jax.ops import ragged_verification as plain
from dspark_jax.ops.packing import Packing

Pages = Float[Array, "P S X C"]
Table = Int[Array, "B I"]


@runtime_checkable
class PagedAttention(Protocol):
    """Packed tokens, row b's at its positions start_B[b].. and in the pages pages_BI[b]."""

    def fits(self, spec: LayerSpec, dtype: DType) -> bool:
        """Whether such a layer can have pages of that type."""
        ...

    def write(
        self, pages_PSXC: Pages, new_NXC: Array, pages_BI: Table, start_B: Int[Array, "B"], packed: Packing
    ) -> Pages:
        """The pages with the tokens' entries; positions of a row behind its own become scratch."""
        ...

    def attend(
        self,
        spec: LayerSpec,
        q_NHC: Array,
        pages_PSXC: Pages,
        pages_BI: Table,
        start_B: Int[Array, "B"],
        count_B: Int[Array, "B"],
    ) -> Array:
        """What tokens mix of their rows up to themselves [N, H, C], anything behind the last one."""
        ...


@dataclass(frozen=True)
class PlainPages:
    """Gathers every row's pages and unpacks its tokens; every device can do that."""

    def fits(self, spec: LayerSpec, dtype: DType) -> bool:
        return True

    def write(
        self, pages_PSXC: Pages, new_NXC: Array, pages_BI: Table, start_B: Int[Array, "B"], packed: Packing
    ) -> Pages:
        places = pages_BI, packed.first_B, start_B, packed.count_B
        return plain_write.write_pages(pages_PSXC, new_NXC, *places, width=packed.width)

    def attend(
        self,
        spec: LayerSpec,
        q_NHC: Array,
        pages_PSXC: Pages,
        pages_BI: Table,
        start_B: Int[Array, "B"],
        count_B: Int[Array, "B"],
    ) -> Array:
        how = {"scale": spec.attention_scale, "window": spec.window}
        return plain.ragged_verification(q_NHC, pages_PSXC, pages_BI, start_B, count_B, **how)


@dataclass(frozen=True, kw_only=True)
class KernelPages:
    """The TPU kernels, which touch what is there and nothing else.

    `interpret`: the one that writes, for heads of any kind; the one that attends cannot be interpreted, and its twin
    takes its place.
    """

    interpret: bool = False

    def fits(self, spec: LayerSpec, dtype: DType) -> bool:
        return self.interpret or kernels.fits(spec.heads, spec.kv_heads, spec.head_dim, dtype)

    def write(
        self, pages_PSXC: Pages, new_NXC: Array, pages_BI: Table, start_B: Int[Array, "B"], packed: Packing
    ) -> Pages:
        places = pages_BI, packed.first_B, start_B, packed.count_B
        return page_write.write_pages(pages_PSXC, new_NXC, *places, width=packed.width, interpret=self.interpret)

    def attend(
        self,
        spec: LayerSpec,
        q_NHC: Array,
        pages_PSXC: Pages,
        pages_BI: Table,
        start_B: Int[Array, "B"],
        count_B: Int[Array, "B"],
    ) -> Array:
        arguments = (q_NHC.astype(pages_PSXC.dtype), pages_PSXC, pages_BI, start_B, count_B)
        how = {"scale": spec.attention_scale, "window": spec.window}
        attend = plain.ragged_verification if self.interpret else kernels.ragged_verification
        return attend(*arguments, **how).astype(q_NHC.dtype)
