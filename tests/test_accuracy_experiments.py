"""Accuracy: every experiment finds what is known beforehand."""

import math

import pytest
import torch

from flash_csa.accuracy import EXPERIMENTS, Shape, Table
from flash_csa.accuracy.case import Case
from flash_csa.accuracy.experiments import decode
from flash_csa.accuracy.experiments.designs import designs
from flash_csa.accuracy.formats import DSA_MAIN, INDEX_FP4
from flash_csa.accuracy.metrics import recall
from flash_csa.accuracy.planted import planted
from flash_csa.accuracy.synthetic import gaussian
from flash_csa.accuracy.table import Result

SHAPE = Shape(layers=5, heads=4, index_heads=8, rows=16)
TOKENS, K = 1024, 128


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(gaussian(TOKENS, SHAPE, 0), K)


@pytest.fixture(scope="module")
def still() -> Case:
    shape = Shape(layers=5, heads=4, index_heads=8, rows=16, drift=0.0)
    return Case(gaussian(TOKENS, shape, 0), K)


def results(name: str, case: Case) -> list[Result]:
    table = Table(name, case.inputs.name, TOKENS, "formula")
    EXPERIMENTS[name].measure(case, table)
    return table.results()


def values(found: list[Result], metric: str, bucket: str = "all") -> dict[str, float]:
    return {r.variant: r.value for r in found if (r.metric, r.bucket) == (metric, bucket)}


def test_kv_formats(case):
    found = results("kv", case)
    errors = values(found, "output error")
    ordered = ("BF16", "E4M3 / UE8M0 per 32", "E2M1 / E4M3 per 16", "E2M1 / UE8M0 per 32")
    assert [errors[name] for name in ordered] == sorted(errors[name] for name in ordered)
    assert errors["BF16"] == 0
    nbytes = {r.variant: r.facts["bytes"] for r in found}
    assert [nbytes[name] for name in ordered] == [1024, 528, 288, 272]
    assert values(found, "value error")["E2M1 / E4M3 per 16"] == pytest.approx(0.095, abs=2e-3)
    buckets = {r.bucket for r in found}
    assert {f"layer {n}" for n in range(5)} < buckets
    assert {"mode full", "mode reuse", "mode reindex"} < buckets
    assert sum(bucket.startswith("position ") for bucket in buckets) == 4
    every = next(r for r in found if r.bucket == "all")
    assert every.n == 16 and every.low <= every.value <= every.high


def test_index_precision(case):
    found = results("index", case)
    same = values(found, "recall")
    assert same["FP32"] == 1 > same["BF16 rounded"] > same["FP8"] > same["FP4"] > 0.8
    assert same["FP4 keys alone"] > same["FP4"]
    mass = values(found, "mass covered")
    assert all(mass["oracle"] >= value for value in mass.values())
    assert values(found, "recall of the oracle")["oracle"] == 1
    assert values(found, "output error")["FP32"] == 0
    shares, differing = values(found, "recall"), values(found, "differing slots")
    assert all(differing[name] == pytest.approx(1 - shares[name], abs=1e-6) for name in shares)


def test_pool(case):
    same = values(results("pool", case), "recall")
    assert same["everything, blocks of 8"] == 1
    for block in (1, 4, 8, 32):
        row = [
            same[f"{share} of the context, blocks of {block}"] for share in ("1/8", "1/4", "1/2")
        ]
        assert row == sorted(row)
    for share in ("1/8", "1/4", "1/2"):
        row = [same[f"{share} of the context, blocks of {block}"] for block in (32, 8, 4, 1)]
        assert row == sorted(row)


def test_reuse(case, still):
    unmoved = results("reuse", still)
    # Identical queries: whoever selects selects the same, but for what a pool leaves out.
    for name in ("Reuse only", "Reindex over everything"):
        assert values(unmoved, "output error")[name] == 0
        assert values(unmoved, "recall")[name] == 1
    found = results("reuse", case)
    errors = [values(found, "output error", f"layer {n}")["Reuse only"] for n in range(5)]
    assert errors[0] == 0 < errors[1] < errors[-1]
    same = [values(found, "recall", f"layer {n}")["Reuse only"] for n in range(5)]
    assert same == sorted(same, reverse=True)
    at_reindex = "mode reindex"
    assert values(found, "recall", at_reindex)["Reindex over everything"] == 1
    planned = values(found, "recall", at_reindex)["as planned"]
    assert 1 > planned > values(found, "recall", at_reindex)["Reuse only"]


def test_group():
    long = Case(gaussian(TOKENS, Shape(layers=20, heads=2, index_heads=8, rows=8), 0), K)
    same = values(results("group", long), "recall")
    tails = [same[f"{n} layers, tail"] for n in (4, 8, 20)]
    assert tails == sorted(tails, reverse=True)
    assert same["0 Reindex, tail"] < same["0 Reindex, head"]
    pools = [same[f"pool 1/{n}, tail"] for n in (8, 4, 2, 1)]
    assert pools == sorted(pools)


def test_compression(case):
    found = results("ratio", case)
    errors = values(found, "output error")
    assert errors["ratio 1, all entries"] == 0
    assert all(errors[f"ratio {m}, all entries"] > 0.1 for m in (2, 4, 128))
    assert 0 < errors["ratio 1, oracle"] < errors["ratio 1, index"]
    # With fewer entries than k nothing is left to select.
    assert errors["ratio 128, oracle"] == pytest.approx(errors["ratio 128, all entries"], rel=1e-5)


def test_ceiling(case):
    mass = values(results("ceiling", case), "mass covered")
    for k in (16, 32, 64, 128, 256):
        best = mass[f"oracle, k {k}"]
        assert all(best >= mass[f"{name}, k {k}"] for name in ("FP32 index", "FP4 index", "newest"))
    kept = [mass[f"oracle, k {k}"] for k in (16, 32, 64, 128, 256)]
    assert kept == sorted(kept)


def test_bytes_and_work_of_designs(case):
    """By hand, for 5 layers of which the fifth is Reindex and the pool holds half of 1024."""
    found = {r.variant: r.facts for r in results("designs", case)}
    nbytes = {name: facts["bytes_per_token_and_layer"] for name, facts in found.items()}
    assert nbytes == pytest.approx(
        {
            "CSA2, ratio 1": (288 + 68) / 5,
            "CSA2, ratio 2": (288 + 68) / 2 / 5,
            "V4 CSA + HCA": (3 * (584 + 68) / 4 + 2 * 584 / 128) / 5,
            "index refreshed every 4 layers": (5 * 656 + 2 * 132) / 5,
            "DSA": 656 + 132,
        }
    )
    work = {name: facts["comparisons_per_query_and_layer"] for name, facts in found.items()}
    assert work == {
        "CSA2, ratio 1": (1024 + 512) / 5,
        "CSA2, ratio 2": (512 + 256) / 5,
        "V4 CSA + HCA": 3 * 256 / 5,
        "index refreshed every 4 layers": 2 * 1024 / 5,
        "DSA": 1024,
    }
    assert DSA_MAIN.bytes == 656
    modes = ("full", "reuse", "reuse", "reuse", "reindex")
    assert [part.mode for part in designs(modes)["CSA2, ratio 1"]] == list(modes)


def test_designs_lose_in_the_order_of_their_bytes(case):
    errors = values(results("designs", case), "output error")
    assert errors["DSA"] < errors["index refreshed every 4 layers"]
    assert errors["CSA2, ratio 1"] < errors["V4 CSA + HCA"]


def test_retrieval():
    case = Case(planted(2048, Shape(layers=2, heads=4, index_heads=8, rows=64), 0), 256)
    found = results("retrieval", case)
    share = values(found, "answered")
    assert share["oracle, BF16 KV"] > 0.95 and values(found, "found")["oracle, BF16 KV"] == 1
    assert 0.5 < share["as planned, FP4 KV"] <= 1
    assert {r.bucket for r in found if r.bucket.startswith("kind ")} == {
        f"kind {kind}" for kind in ("single", "several", "ordered", "negated")
    }
    assert all(r.n == 16 for r in found if r.metric == "decoy wins" and r.bucket == "all")
    with pytest.raises(ValueError, match="needs planted evidence"):
        results("retrieval", Case(gaussian(256, Shape(layers=1, rows=2), 0), 8))


def test_decode(case, monkeypatch):
    monkeypatch.setattr(decode, "STEPS", 16)
    found = values(results("decode", case), "output error")
    assert len(found) == 9 and all(math.isfinite(value) and value > 0 for value in found.values())
    both = found["FP4 KV and index, FP8 window, step 16"]
    assert both >= 0.5 * found["FP4 KV, FP8 window, step 16"]


def test_histogram_counts_rows_and_layers(case):
    table = Table("index", "gaussian", TOKENS, "formula")
    EXPERIMENTS["index"].measure(case, table)
    made = table.histograms()
    assert [h["variant"] for h in made] == ["FP32", "FP8", "FP4"]
    assert all(sum(h["counts"]) == 16 * 5 for h in made)


def test_table_refuses_unknown_metrics(case):
    with pytest.raises(KeyError):
        Table("kv", "x", 1, "formula").put(case, "v", "accuracy", None, torch.zeros(16))


def test_teachers_are_their_own():
    """Teachers and expectations are by formula, whatever the back end under test does."""
    from test_accuracy_faults import FAULTS

    backend, _ = FAULTS["index nibbles swapped"]
    inputs = gaussian(TOKENS, SHAPE, 0)
    clean, faulty = Case(inputs, K), Case(inputs, K, backend)
    assert torch.equal(clean.teacher(1, INDEX_FP4), faulty.teacher(1, INDEX_FP4))
    assert torch.equal(clean.dense(0), faulty.dense(0))
    same = recall(
        backend.select(faulty.scores(1, INDEX_FP4), faulty.where(), K), clean.teacher(1), TOKENS
    )
    assert float(same.mean()) < 0.9
