"""python -m bench.pack_peers WHEEL FOLDER: what `peers` needs of a vLLM wheel, about 22 MB.

The libraries lose their machine code for other architectures (zeros compress to nothing); two
Triton files come with as much of their package as lets them be imported.
"""

import io
import lzma
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Annotated

import typer

LIBRARIES = {
    "vllm/_flashmla_C.abi3.so": "flashmla.so.xz",
    "vllm/_C_stable_libtorch.abi3.so": "vllm_c.so.xz",
    "vllm/third_party/deep_gemm/_C_extension.abi3.so": "deep_gemm_c.so.xz",
}
DEEP_GEMM = "vllm/third_party/"
OPS = "vllm/models/deepseek_v41/common/ops"
TRITON = (f"{OPS}/fused_compress_quant_cache.py", f"{OPS}/indexer_k_store.py")
FP4 = "vllm/models/deepseek_v4/common/ops/fused_indexer_q.py"
JIT = "from vllm.triton_utils import tl, triton\n\n\n@triton.jit\n"
STUBS = {  # what the two files import, for a Hopper GPU; the FP4 and MX paths are never taken
    "vllm/platforms/__init__.py": (
        "class _Cuda:\n"
        "    is_rocm = staticmethod(lambda: False)\n"
        "    is_cuda = staticmethod(lambda: True)\n\n\n"
        "current_platform = _Cuda()\n"
    ),
    "vllm/triton_utils/__init__.py": "import triton\nimport triton.language as tl\n",
    "vllm/utils/deep_gemm.py": "def mqa_logits_use_mx_scales():\n    return False\n",
    FP4: JIT + "def _fp32x2_to_fp4x2(low, high):\n    return low.to(tl.uint8)\n",
    f"{OPS}/__init__.py": (
        "MXFP4_BLOCK_SIZE = 32\n"
        "from vllm.models.deepseek_v4.common.ops.fused_indexer_q import _fp32x2_to_fp4x2\n"
    ),
    "vllm/v1/attention/ops/common.py": JIT + "def pack_ue8m0_x4(scale):\n    return scale\n",
}

FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
FATBIN_HEADER = 16
ARCHITECTURE_AT = 28  # in an entry's header
SM90 = 90


def main(
    wheel: Annotated[Path, typer.Argument(help="vllm-0.33.0-....whl")],
    folder: Annotated[Path, typer.Argument(help="Where to; git ignores .peers.")] = Path(".peers"),
) -> None:
    """Packs the peers of a wheel into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as files:
        for name, short in LIBRARIES.items():
            with lzma.open(folder / short, "wb", preset=6) as target:
                target.write(keep_sm90(bytearray(files.read(name))))
        python = {
            name.removeprefix(DEEP_GEMM): files.read(name)
            for name in files.namelist()
            if name.startswith(DEEP_GEMM + "deep_gemm/") and not name.endswith((".so", "/"))
        }
        _write(folder / "deep_gemm.tar.xz", python)
        triton = {name: files.read(name) for name in TRITON}
    triton |= {name: text.encode() for name, text in STUBS.items()}
    for name in list(triton):
        for parent in list(Path(name).parents)[:-1]:
            triton.setdefault(f"{parent}/__init__.py", b"")
    _write(folder / "triton_compress.tar.xz", triton)
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path.name}")


def keep_sm90(library: bytearray) -> bytearray:
    """Zeros every fat-binary entry for another architecture, in place."""
    at = 0
    while (at := library.find(FATBIN_MAGIC, at)) >= 0:
        header, size = struct.unpack_from("<HQ", library, at + 6)
        end = at + header + size
        if header != FATBIN_HEADER or end > len(library):  # the bytes occur by chance
            at += len(FATBIN_MAGIC)
            continue
        entry = at + header
        while entry < end:
            entry_header, entry_size = struct.unpack_from("<IQ", library, entry + 4)
            if entry_header == 0:
                break
            architecture = struct.unpack_from("<I", library, entry + ARCHITECTURE_AT)[0]
            body = entry + entry_header
            if architecture != SM90:
                library[body : body + entry_size] = bytes(entry_size)
            entry = body + entry_size
        at = end
    return library


def _write(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:xz") as archive:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    typer.run(main)
