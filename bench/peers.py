"""The public kernels that a Hopper user runs today, on the same content in their own formats.

They come from one public wheel and are optional; without them a case reports ours alone. To fetch
them, once, on a machine with network:

    pip download --no-deps --only-binary=:all: --python-version 3.12 \\
        --platform manylinux_2_28_x86_64 -d DOWNLOADS vllm==0.33.0
    python -m bench.pack_peers DOWNLOADS/vllm-0.33.0-*.whl .peers

FLASH_CSA_PEERS names the folder that the second command made; default `.peers`.
"""

import lzma
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash_csa import RECORDS, Pages, load
from flash_csa.plan import HEAD_DIM, INDEX_DIM

from .cases import PAGE, WINDOW, Case
from .inputs import Inputs
from .ours import Call, Work

SCALE = HEAD_DIM**-0.5
MIN_HEADS = 64  # of the fused store: fewer are padded
DECODE_HEADS = (64, 128)  # of FlashMLA's decode: fewer are padded, as the peer to the next of them
PREFILL_HEADS = 64  # its prefill takes fewer, as the peer does, but not always in less time
TOPK_WORKSPACE = 1 << 20
COOPERATIVE_ROWS = 64  # at most, of vLLM's cooperative top-k
STORE_PAGE = 32
RING = 8  # positions of the compressor's state per request
FILES = (
    "flashmla.so.xz",
    "vllm_c.so.xz",
    "deep_gemm_c.so.xz",
    "deep_gemm.tar.xz",
    "triton_compress.tar.xz",
)


class Peers:
    """The peers that could be loaded, and closures for a case.

    missing: one line, or "".
    """

    def __init__(self, folder: str | os.PathLike | None = None) -> None:
        self.folder = Path(folder or os.environ.get("FLASH_CSA_PEERS", ".peers"))
        self.missing = ""
        self.deep_gemm: Any = None
        self._compress: tuple[Any, Any] | None = None
        absent = [name for name in FILES if not (self.folder / name).exists()]
        if absent:
            self.missing = f"no peers: {self.folder} lacks {', '.join(absent)} (see bench/peers.py)"
        elif not torch.cuda.is_available():
            self.missing = "no peers: they need a GPU"
        else:
            self._load()

    def _load(self) -> None:
        target = Path(tempfile.mkdtemp(prefix="flash_csa_peers_"))
        for name in ("deep_gemm.tar.xz", "triton_compress.tar.xz"):
            with tarfile.open(self.folder / name) as archive:
                archive.extractall(target, filter="data")
        libraries = {
            "flashmla.so.xz": "flashmla.so",
            "vllm_c.so.xz": "vllm_c.so",
            "deep_gemm_c.so.xz": "deep_gemm/_C_extension.abi3.so",
        }
        for name, short in libraries.items():
            with lzma.open(self.folder / name) as source:
                (target / short).write_bytes(source.read())
        sys.path.insert(0, str(target))
        try:
            torch.ops.load_library(str(target / "flashmla.so"))
            torch.ops.load_library(str(target / "vllm_c.so"))
            import deep_gemm
            from vllm.models.deepseek_v41.common.ops import (
                fused_compress_quant_cache,
                indexer_k_store,
            )
        except (ImportError, OSError, RuntimeError) as error:
            self.missing = f"no peers: {str(error).splitlines()[0]}"
            return
        self.deep_gemm = deep_gemm
        self._compress = (fused_compress_quant_cache, indexer_k_store)

    def build(self, case: Case, inputs: Inputs, work: Work) -> dict[str, list[Call]]:
        """Closures for the same instances, by the peer's name; several where there are more ways
        to call it than one: `named` says which of them is the peer."""
        builders: dict[str, Callable[..., dict[str, list[Call]]]] = {
            "attend_decode": self._attend_decode,
            "attend_prefill": self._attend_prefill,
            "attend_contiguous": self._attend_decode,
            "index_scores": self._index,
            "index_select": self._index,
            "reindex": self._index,
            "select": self._select,
            "rope_store": self._rope_store,
            "compress": self._compress_store,
        }
        if self.missing or case.kind not in builders:
            return {}
        return builders[case.kind](case, inputs, work)

    # FlashMLA

    def _attend_decode(self, case: Case, inputs: Inputs, work: Work) -> dict[str, list[Call]]:
        return {
            f"FlashMLA sparse decode, {heads} heads": self._decode(case, heads, inputs, work)
            for heads in DECODE_HEADS
            if heads >= case["heads"]
        }

    def _decode(self, case: Case, heads: int, inputs: Inputs, work: Work) -> list[Call]:
        main = _records_584(inputs.pages("MixedFp8", case["records"]))
        window = _records_584(inputs.pages("MixedFp8", case["windows"]))
        sink = work.content["shared"]["sink"].repeat(heads // case["heads"])
        meta: list[Any] = [None, None]  # tile schedule and splits: made by the first call

        def call(q: Tensor, window_slots: Tensor, main_slots: Tensor) -> None:
            out = torch.ops._flashmla_C.sparse_decode_fwd(
                *(q, window, window_slots, None, sink, *meta, main, main_slots, None),
                *(HEAD_DIM, SCALE, None, False),
            )
            meta[:] = out[2:]

        def slots(instance: dict[str, Any]) -> Tensor:
            if "selection" in instance:
                return instance["selection"].slots
            table = instance["contiguous"][0]
            return (table[..., None] * PAGE + inputs.arange(PAGE)).flatten(1)

        calls = []
        for instance in work.content["instances"]:
            q = instance["q"].repeat(1, heads // case["heads"], 1)[:, None]
            lists = (instance["window"].slots[:, None], slots(instance)[:, None])
            calls.append(partial(call, q, *(x.contiguous() for x in lists)))
        return calls

    def _attend_prefill(self, case: Case, inputs: Inputs, work: Work) -> dict[str, list[Call]]:
        rows, records = case["rows"], case["records"]
        pages = work.content["shared"]["main"]
        kv = load(pages, inputs.arange(records))[:, None]
        instances = work.content["instances"]
        listed = case["k"] + WINDOW
        lists = [inputs.ascending(rows, listed, records)[:, None].contiguous() for _ in instances]
        sides = {}
        for heads in sorted({case["heads"], max(PREFILL_HEADS, case["heads"])}):
            times = heads // case["heads"]
            options = (SCALE, HEAD_DIM, work.content["shared"]["sink"].repeat(times), None, None)
            sides[f"FlashMLA sparse prefill, {heads} heads"] = [
                partial(
                    torch.ops._flashmla_C.sparse_prefill_fwd,
                    *(instance["q"].repeat(1, times, 1), kv, slots, *options),
                )
                for instance, slots in zip(instances, lists, strict=True)
            ]
        return sides

    # DeepGEMM, vLLM's top-k

    def _index(self, case: Case, inputs: Inputs, work: Work) -> dict[str, list[Call]]:
        ragged = case["rows"] > case["requests"]
        build = self._ragged_scores if ragged else self._paged_scores
        scores = build(case, inputs, work)
        name = "DeepGEMM FP8 " + ("ragged" if ragged else "paged")
        if case.kind == "index_scores":
            return {name: scores}
        topk = self._topk(case, inputs)

        def both(score: Call, top: Call) -> None:
            top(score())

        return {
            f"{name} + {kind}": [partial(both, score, top) for score in scores]
            for kind, top in topk.items()
        }

    def _paged_scores(self, case: Case, inputs: Inputs, work: Work) -> list[Call]:
        rows, entries = case["rows"], case["entries"]
        pages = inputs.pages("IndexFp8", case["records"], wide=case["wide"])
        cache = pages.data.view(-1, PAGE, 1, RECORDS[pages.record].bytes)
        lengths = torch.full((rows, 1), entries, dtype=torch.int32, device=inputs.device)
        sms = self.deep_gemm.get_num_sms()
        meta = self.deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, sms)
        return [
            partial(
                self.deep_gemm.fp8_fp4_paged_mqa_logits,
                (_fp8(instance["q"])[:, None], None),
                cache,
                instance["weights"],
                lengths,
                instance["block_table"],
                meta,
                entries,
            )
            for instance in work.content["instances"]
        ]

    def _ragged_scores(self, case: Case, inputs: Inputs, work: Work) -> list[Call]:
        rows, entries = case["rows"], case["entries"]
        pages = inputs.pages("IndexFp8", case["records"], wide=case["wide"])
        start = torch.zeros(rows, dtype=torch.int32, device=inputs.device)
        end = torch.full_like(start, entries)
        calls = []
        for instance in work.content["instances"]:
            data = pages.data[instance["block_table"][0].long()]
            split = PAGE * INDEX_DIM
            keys = data[:, :split].reshape(entries, INDEX_DIM).view(torch.float8_e4m3fn)
            scales = data[:, split:].reshape(-1).view(torch.float32)
            arguments = ((_fp8(instance["q"]), None), (keys, scales), instance["weights"])
            score = self.deep_gemm.fp8_fp4_mqa_logits
            calls.append(partial(score, *arguments, start, end, entries))
        return calls

    def _topk(self, case: Case, inputs: Inputs) -> dict[str, Callable[[Tensor], None]]:
        rows, entries, k = case["rows"], case["entries"], case["k"]
        lengths = torch.full((rows, 1), entries, dtype=torch.int32, device=inputs.device)
        out = inputs.empty(rows, k)
        workspace = torch.zeros(TOPK_WORKSPACE, dtype=torch.uint8, device=inputs.device)
        names = ["persistent_topk"]
        if rows <= COOPERATIVE_ROWS:
            names.append("cooperative_topk")

        def call(op: Any, logits: Tensor) -> None:
            op(logits, lengths, out, workspace, k, entries)

        return {name: partial(call, getattr(torch.ops._C, name)) for name in names}

    def _select(self, case: Case, inputs: Inputs, work: Work) -> dict[str, list[Call]]:
        return {
            f"vLLM {name}": [partial(top, scores) for scores in work.content["scores"]]
            for name, top in self._topk(case, inputs).items()
        }

    # vLLM's store and compressor

    def _rope_store(self, case: Case, inputs: Inputs, work: Work) -> dict[str, list[Call]]:
        if case["q_norm"]:
            return {}
        cache = inputs.pages("MixedFp8", case["records"], STORE_PAGE).data
        op = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
        calls = [
            partial(
                op,
                *(instance["q"], instance["kv"], cache),
                *(instance["slots"].long(), instance["positions"].long()),
                *(work.content["cos_sin"], MIN_HEADS, 1e-6, STORE_PAGE),
                *(False, False, True, False),
            )
            for instance in work.content["instances"]
        ]
        return {"vLLM fused q RoPE + insert": calls}

    def _compress_store(self, case: Case, inputs: Inputs, work: Work) -> dict[str, list[Call]]:
        if case["ratio"] > 2:
            return {}
        shared, records = work.content["shared"], work.content["records"]
        cache = _records_584(inputs.pages("MixedFp8", records)).view(torch.uint8)[:, :, 0]
        pages = inputs.pages("IndexFp8", records)
        keys = pages.data.view(-1, PAGE, RECORDS[pages.record].bytes)
        norms = [shared[name].bfloat16() for name in ("norm_weight", "key_norm_weight")]
        calls = [
            self._compress_call(case, inputs, shared, cache, keys, norms, instance)
            for instance in work.content["instances"]
        ]
        return {"vLLM compressor, four launches": calls}

    def _compress_call(
        self,
        case: Case,
        inputs: Inputs,
        shared: dict[str, Any],
        cache: Tensor,
        keys: Tensor,
        norms: list[Tensor],
        instance: dict[str, Any],
    ) -> Call:
        assert self._compress is not None
        pool, store_key = self._compress
        ratio, tokens, requests = (case[key] for key in ("ratio", "tokens", "requests"))
        batch, cos_sin = instance["batch"], shared["cos_sin"]
        if ratio == 1:
            rows, state = instance["kv"].float(), None
        else:  # kv, then gate: the halves of one tensor
            rows = torch.cat([instance["kv"], instance["gate"]], 1)
            state = torch.zeros(requests, RING, rows.shape[1], device=inputs.device)
        positions, slots = batch.positions.long(), instance["entry_slots"].long()
        request = batch.row_request
        ring = request.long() * RING + positions % RING if ratio == 2 else slots
        latent = torch.empty(tokens, HEAD_DIM, dtype=torch.bfloat16, device=inputs.device)
        weight = shared["key_weight"]
        eps = shared["eps"]

        def call() -> None:
            pool.fused_save_compress_norm(
                *(rows, positions, state, ring, batch.cu_tokens, request),
                *(norms[0], eps, ratio, latent),
            )
            pool.rope_quant_insert(latent, positions, cos_sin, cache, slots, ratio)
            key = latent @ weight.T
            store_key.indexer_k_norm_rope_store(
                *(key, positions, cos_sin, norms[1], eps, keys, slots, ratio, False)
            )

        return call


def named(case: Case, sides: Iterable[str]) -> str | None:
    """Of the ways to call a peer that which recorded times and bars are of: in attend the first,
    with the fewest heads. None: the fastest counts."""
    return next(iter(sides), None) if case.stage == "attend" else None


def _records_584(pages: Pages) -> Tensor:
    """e4m3 [pages, page_size, 1, 584]: the view of page-split records that the kernels take."""
    record = RECORDS[pages.record].bytes
    count, stride = pages.data.shape
    view = pages.data.view(torch.float8_e4m3fn)
    return view.as_strided((count, pages.page_size, 1, record), (stride, record, record, 1))


def _fp8(q: Tensor) -> Tensor:
    return q.to(torch.float8_e4m3fn)
