"""The demo: both passes agree, and a difference of one byte is seen."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from flash_csa import configs
from flash_csa.cli import demo
from flash_csa.cli.app import app
from flash_csa.cli.demo import inputs, passes

ROLES = ["window", "full", "reuse", "full", "reindex", "reuse"]
SMALL = configs.V41_FLASH | {
    "num_hidden_layers": len(ROLES),
    "num_attention_heads": 4,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3,
    "index_topk": 64,
}

V4_ROLES = ["window", "full", "contiguous", "full"]
SMALL_V4 = configs.V4_FLASH | {
    "num_hidden_layers": len(V4_ROLES),
    "num_attention_heads": 4,
    "compress_ratios": [0, 4, 128, 4],
    "index_n_heads": 8,
    "index_topk": 64,
}


@pytest.fixture
def small(monkeypatch):
    """The demo on six layers and four heads, one of every role."""
    monkeypatch.setitem(configs.BY_NAME, demo.MODEL, SMALL)


@pytest.fixture
def small_v4(tmp_path):
    """A config.json of four layers and four heads, one of every role of V4."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL_V4))
    return str(path)


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["demo", *arguments])


def figures(*arguments: str) -> dict:
    result = invoke("--json", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_the_whole_model_in_a_process_of_its_own():
    command = [sys.executable, "-m", "flash_csa", "demo", "--tokens", "600", "--json"]
    # One thread: where other tests keep the cores busy, threads wait for one another.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["passed"] and result["equal"]
    assert (result["tokens"], result["query_rows"]) == (616, 80)
    assert [found["different"] for found in result["agreement"]] == [0] * 6
    compared = {found["what"].split()[0]: found["compared"] for found in result["agreement"]}
    assert compared["main"] == compared["index"] == 3 * 308 + 616
    assert compared["window"] == 40 * 128
    assert compared["selections,"] == 8 * 80 and compared["candidate"] == 80
    assert compared["attention"] == 40 * 80
    assert result["cache"]["bytes_per_token"] == 890.0
    assert result["cache"]["nbytes"] == 890 * result["cache"]["tokens"]
    roles = [layer["role"] for layer in result["layers"]]
    assert [roles.count(role) for role in ("window", "full", "reindex", "reuse")] == [2, 4, 4, 30]
    assert [layer["selected"] for layer in result["layers"]] == [0] * 2 + [308] * 18 + [512] * 20
    assert sum(layer["record_nbytes"] for layer in result["layers"]) == (3 * 308 + 616) * 356
    assert result["seconds"]["total"] > 0
    assert set(result["passes"]["decode"]["stage_seconds"]) == set(passes.STAGES)


def test_v4_flash_in_a_process_of_its_own():
    command = [sys.executable, "-m", "flash_csa", "demo", "--model", "v4-flash", "--tokens", "130"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["model"] == "v4-flash" and result["passed"] and result["equal"]
    assert (result["query_rows"], result["uncut_query_rows"]) == (32, 80)
    compared = {found["what"].split()[0]: found["compared"] for found in result["agreement"]}
    assert compared["main"] == 21 * 36 + 20 and compared["index"] == 21 * 36
    assert compared["window"] == 43 * 128 and "candidate" not in compared
    assert compared["selections,"] == 21 * 32 and compared["attention"] == 43 * 32
    cache = result["cache"]
    assert cache["stated_bytes_per_token"] == 3514.25
    # A page of 64 is 65 rows of 576 bytes, a page of 8 is 9 of them.
    padding = 21 * (65 * 576 - 64 * 584) / 256 + 20 * (9 * 576 - 8 * 584) / 1024
    assert cache["padding_bytes_per_token"] == padding
    assert cache["bytes_per_token"] == 3514.25 + padding
    assert cache["nbytes"] == cache["bytes_per_token"] * cache["tokens"]


def test_v4_of_a_config(small_v4):
    result = figures("--model", small_v4, "--tokens", "600")
    assert result["model"] == small_v4 and result["passed"] and result["equal"]
    assert [layer["role"] for layer in result["layers"]] == V4_ROLES
    assert [layer["visible"] for layer in result["layers"]] == [0, 154, 4, 154]
    assert [layer["selected"] for layer in result["layers"]] == [0, 64, 0, 64]
    assert all(error["wrong"] == 0 and error["of_bound"] <= 1 for error in result["errors"])
    assert all(0 < error["quantisation"] < 0.2 for error in result["errors"])
    selecting = [error for error in result["errors"] if error["shared"] is not None]
    assert len(selecting) == 2
    assert all(error["shared"] > 0.7 and 0.5 < error["kept"] <= 1 for error in selecting)
    assert min(result["identical_records"].values()) > 0.99


@pytest.mark.parametrize("tokens", ["1", "4", "113", "834"])
def test_v4_lengths(small_v4, tokens):
    """No entry of ratio 128, the first one during decode, one chunk and more."""
    result = figures("--model", small_v4, "--tokens", tokens, "--synthetic", "--seed", "3")
    assert result["passed"] and result["prompt_tokens"] == int(tokens)


def test_v4_text(small_v4):
    result = invoke("--model", small_v4, "--tokens", "100")
    assert result.exit_code == 0, result.output
    assert "32 tokens attend instead of 80" in " ".join(result.stdout.split())
    assert "pad pages; records alone" in result.stdout
    assert "pool" not in result.stdout and "reindex" not in result.stdout
    assert all(role in result.stdout for role in V4_ROLES)


def test_an_error_of_v4_that_both_passes_share_is_seen(small_v4, monkeypatch):
    """A query without its norm agrees with itself, but not with the reference."""
    rope_store = passes.library.rope_store

    def unnormed(*args, **kwargs):
        return rope_store(*args, **{**kwargs, "q_norm_eps": None})

    monkeypatch.setattr(passes.library, "rope_store", unnormed)
    result = invoke("--model", small_v4, "--tokens", "200", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["equal"] and not found["passed"]


def test_real_activations(small):
    result = figures("--tokens", "600")
    assert [layer["role"] for layer in result["layers"]] == ROLES
    assert all(error["wrong"] == 0 and error["of_bound"] <= 1 for error in result["errors"])
    assert all(0 < error["quantisation"] < 0.2 for error in result["errors"])
    selecting = [error for error in result["errors"] if error["shared"] is not None]
    assert all(error["shared"] > 0.7 and 0.5 < error["kept"] <= 1 for error in selecting)
    assert min(result["identical_records"].values()) > 0.99


def test_pool_at_work(small):
    result = figures("--tokens", "400", "--pool-blocks", "20")
    reindex = result["layers"][4]
    # 416 entries are 52 whole blocks, so that 20 blocks are 160 entries.
    assert (reindex["visible"], reindex["scored"], reindex["selected"]) == (416, 160, 64)


def test_text_says_what_the_pool_leaves(small):
    # 116 entries end in the middle of a block, which is always in the pool.
    text = invoke("--tokens", "100", "--pool-blocks", "10").stdout
    assert "76 of 116 entries to score" in text


def test_text_says_where_the_pool_covers_everything(small):
    result = invoke("--tokens", "200", "--synthetic")
    assert result.exit_code == 0, result.output
    assert "covers everything here" in result.stdout
    assert "bytes/token" in result.stdout
    assert "Prefill and decode are equal: records byte for byte" in result.stdout
    assert all(role in result.stdout for role in ROLES)


@pytest.mark.parametrize("tokens", ["1", "2", "64", "65", "834"])
def test_lengths(small, tokens):
    """Shorter than the queries, exactly the queries, one chunk and a token of another."""
    result = figures("--tokens", tokens, "--synthetic", "--seed", "3")
    assert result["passed"] and result["prompt_tokens"] == int(tokens)


def test_own_input(small, tmp_path):
    path = tmp_path / "states.safetensors"
    save_file({"hidden_states": torch.randn(50, 36).bfloat16()}, path)
    result = figures("--tokens", "50", "--input", str(path))
    assert result["passed"]
    expected = {"origin": str(path), "width": 36, "seed": 0, "repeated": demo.DECODE_STEPS}
    assert result["input"] == expected


def test_equal_seeds_give_equal_weights():
    states = inputs.synthetic_hidden(20, seed=1).states
    plan = demo.LayerPlan.from_config(SMALL)
    a, b, c = (demo.Projector(plan, states, 4, seed).run() for seed in (5, 5, 6))
    assert all(torch.equal(x.q, y.q) for x, y in zip(a.queries, b.queries, strict=True))
    assert not torch.equal(a.queries[0].q, c.queries[0].q)


def _main_byte(run):
    page = run.pages.block_tables[2][0, 0]
    run.cache.groups[0].main.data[page, 0] ^= 1


def _index_scale(run):
    pages = run.cache.groups[1].index
    page = run.pages.block_tables[1][0, 0]
    pages.data[page, pages.page_size * 64] ^= 1


def _window_byte(run):
    tokens, pages = run.inputs.tokens, run.cache.window[0]
    table = run.pages.window_table[0]
    last = tokens - 1
    page = table[last // pages.page_size % len(table)]
    pages.data[page, last % pages.page_size * 528 + 511] ^= 0x80


def _selection(run):
    run.results[4].selections[-1][0, 0] += 1


def _pool(run):
    run.results[3].pools[0][0, 0] += 1


def _output_bit(run):
    run.results[0].out[0].view(torch.int16)[0, 0, 0] ^= 1


@pytest.mark.parametrize(
    ("corrupt", "what"),
    [
        (_main_byte, "main records, bytes"),
        (_index_scale, "index records, bytes"),
        (_window_byte, "window records, bytes"),
        (_selection, "selections, positions"),
        (_pool, "candidate pools, blocks"),
        (_output_bit, "attention outputs, bits"),
    ],
)
def test_one_difference_is_seen(small, monkeypatch, corrupt, what):
    compare = demo.compare

    def corrupted(prefill, decode):
        corrupt(decode)
        return compare(prefill, decode)

    monkeypatch.setattr(demo, "compare", corrupted)
    result = invoke("--tokens", "200", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["passed"] and not found["equal"]
    different = {each["what"]: each["different"] for each in found["agreement"]}
    assert different.pop(what) == 1 and set(different.values()) == {0}


def test_text_names_what_differs(small, monkeypatch):
    compare = demo.compare

    def corrupted(prefill, decode):
        _main_byte(decode)
        return compare(prefill, decode)

    monkeypatch.setattr(demo, "compare", corrupted)
    result = invoke("--tokens", "100")
    assert result.exit_code == 1
    assert "1 DIFFER" in result.stdout
    assert "Prefill and decode DIFFER." in result.stdout


def test_an_error_that_both_passes_share_is_seen(small, monkeypatch):
    """A kernel that drops the sink agrees with itself, but not with the reference."""
    attend = passes.library.attend

    def sinkless(*args, **kwargs):
        return attend(*args, **{**kwargs, "sink": None})

    monkeypatch.setattr(passes.library, "attend", sinkless)
    result = invoke("--tokens", "200", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["equal"] and not found["passed"]
    assert max(error["of_bound"] for error in found["errors"]) > 1


def test_caches_start_as_poison():
    plan = replace(demo.LayerPlan.from_config(SMALL), topk=8)
    hidden = inputs.synthetic_hidden(20, seed=1).states
    projections = demo.Projector(plan, hidden, 4, 0).run()
    run = passes.Pass(plan, projections, {"window": None, "compressed": None}, cuts=[0, 20], seed=0)
    pages = [group.main for group in run.cache.groups] + list(run.cache.window)
    assert all((each.data == 0xFF).all() for each in pages)
    assert run.cache.tails[0].main.rows.isnan().all()
