"""Compile the tile kernels for several GPUs, without a GPU: they fit, spill little and copy 16 bytes at a time.

A kernel that needs more shared memory than a GPU has raises triton's OutOfResources at the first call.
"""

import collections
import re
import subprocess

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from megaclip.ops import tiles_triton_blocks as blocks  # noqa: E402
from megaclip.ops import tiles_triton_kernels as kernels  # noqa: E402

KERNELS = {
    "stats": kernels._tile_stats_kernel,
    "grads": kernels._tile_grads_kernel,
    "sigmoid": kernels._tile_sigmoid_kernel,
}
# Compute capability -> shared memory per program in KiB (CUDA programming guide, technical specifications). The kernels
# of 8.6 are also those of 8.9, which has as much, and of 8.0, which has more.
SHARED_KIB = {86: 99, 90: 227, 100: 227, 120: 99}
DIVISIBLE = [["tt.divisibility", 16]]


def compiled(capability: int, precision: str, name: str, with_ids: bool = False):
    """Return a kernel as it is launched on a GPU of this compute capability, with features of 512 columns."""
    tiles, pointers = blocks.tiles_for(capability // 10)
    tile = tiles[precision, name]
    loaded, dtype = precision == "float32", "bf16" if precision == "bf16" else "fp32"
    stores = 4 if name == "sigmoid" else tile.stores
    slices = (tile.block_m, tile.block_n) if loaded else None
    shapes = {
        "x": slices or (tile.block_m, tile.block_k),
        "y": slices or (tile.block_n, tile.block_k),
        "p_matrix": (tile.block_m, tile.block_n // stores),
    }
    constants = {"D": 512, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    constants |= {"GROUP": tile.group, "LOADED": loaded, "POINTERS": pointers, "CHUNK": 4, "STORES": tile.stores}
    constants |= {"NUM_WARPS": tile.num_warps, "DOTS": True, "HAS_IDS": with_ids}
    signature, values, attributes = {}, {}, {}
    for index, argument in enumerate(KERNELS[name].arg_names):
        if argument in constants:
            signature[argument], values[index,] = "constexpr", constants[argument]
        elif argument in shapes and pointers:
            signature[argument] = (f"*{dtype}", "i32")
            attributes |= {(index, 0): DIVISIBLE, (index, 1): DIVISIBLE}
        elif argument in shapes:
            signature[argument] = f"tensordesc<{dtype}{[*shapes[argument]]}>"
        elif argument.endswith("_ptr"):
            signature[argument], attributes[index,] = "*i32" if "gaps" in argument else "*fp32", DIVISIBLE
        else:
            signature[argument] = "i32"
    return triton.compile(
        ASTSource(KERNELS[name], signature, constexprs=values, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )


def spilled_bytes(ptx: str, capability: int) -> int:
    """Return the bytes of registers that a thread writes to memory, from the assembler's report."""
    target = re.search(r"\.target (\w+)", ptx)[1]
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={target}", "-o", "/dev/null", "/dev/stdin"]
    report = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    return sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", report))


ALL = [(capability, *kind, False) for capability in SHARED_KIB for kind in blocks.TILES]
ALL += [(90, "bf16", "grads", True)]  # the shared memory of two programs must fit into a multiprocessor
# With the tiles of the H200, these kernels would read single elements, spill kilobytes, or need too much shared memory.
QUICK = [
    *((86, "bf16", "grads", False), (100, "bf16", "stats", False), (120, "bf16", "sigmoid", False)),
    *((120, "tf32", "grads", False), (90, "bf16", "grads", True)),
]


@pytest.mark.parametrize(
    ("capability", "precision", "name", "with_ids"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.long, id="-".join(map(str, case))) for case in ALL],
)
def test_a_kernel_fits_spills_little_and_copies_16_bytes_at_a_time(
    capability: int, precision: str, name: str, with_ids: bool
) -> None:
    kernel = compiled(capability, precision, name, with_ids)
    assert capability == 90 or spilled_bytes(kernel.asm["ptx"], capability) <= 256  # the kernels for Hopper were timed
    programs = blocks.tiles_for(capability // 10)[0][precision, name].programs_per_sm
    assert programs * (kernel.metadata.shared + 1024) <= (SHARED_KIB[capability] + 1) * 1024
    if capability < 90 and precision != "float32":  # float32 products use the library
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x\w+)", kernel.asm["ptx"])
        assert collections.Counter(copies).keys() == {"0x10"}
        stores = collections.Counter(re.findall(r"st\.global\S*", kernel.asm["ptx"]))
        assert "st.global.b16" not in stores
        assert name == "stats" or stores["st.global.v4.b32"] >= 8
