"""Roles, sources and groups of the published models, and every way to reject a configuration."""

import json
from pathlib import Path

import pytest

from flash_csa import configs
from flash_csa.plan import LayerPlan

PUBLISHED = Path(__file__).parent / "data" / "configs"
GOLDEN = {  # the layer stack of the csa2 golden files
    **configs.V41_FLASH,
    "num_hidden_layers": 6,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3,
}


def modes(plan: LayerPlan, mode: str) -> list[int]:
    return [layer.index for layer in plan.layers if layer.mode == mode]


@pytest.mark.parametrize("name", configs.BY_NAME)
def test_the_shipped_configs_are_the_published_ones(name):
    path = PUBLISHED / f"{name.replace('-', '_')}.json"
    assert configs.BY_NAME[name] == json.loads(path.read_text())
    plan = LayerPlan.from_config(configs.BY_NAME[name])
    assert LayerPlan.from_config(path) == LayerPlan.from_config(name) == plan


def test_v41_flash_roles():
    plan = LayerPlan.from_config(configs.V41_FLASH)
    assert modes(plan, "window") == [0, 1]
    assert modes(plan, "full") == [2, 8, 14, 20]
    assert modes(plan, "reindex") == [24, 28, 32, 36]
    assert len(modes(plan, "reuse")) == 30
    assert [group.layers for group in plan.groups] == [
        tuple(range(2, 8)),
        tuple(range(8, 14)),
        tuple(range(14, 20)),
        tuple(range(20, 40)),
    ]
    assert [group.ratio for group in plan.groups] == [2, 2, 2, 1]
    assert [layer.index for layer in plan.layers if layer.builds_pool] == [20]
    assert [layer.index for layer in plan.layers if layer.reads_pool] == [24, 28, 32, 36]
    assert [plan.layers[i].index_source for i in (2, 7, 8, 19, 20, 23, 24, 27, 39)] == [
        2, 2, 8, 14, 20, 20, 24, 24, 36,
    ]  # fmt: skip
    assert [plan.layers[i].kv_source for i in (7, 8, 19, 39)] == [2, 8, 14, 20]
    assert (plan.ratios, plan.contiguous_ratios, plan.pool_ratio) == ((1, 2), (), 1)
    assert (plan.heads, plan.index_heads, plan.topk, plan.pool_blocks) == (64, 32, 512, 2048)
    assert (plan.window, plan.eps, plan.q_norm_eps, plan.rotate) == (128, 1e-20, None, False)
    assert {(group.span, group.main_width, group.index_width) for group in plan.groups} == {
        (2, 512, 0),
        (1, 512, 0),
    }


def test_v4_layers_are_groups_of_one():
    plan = LayerPlan.from_config(configs.V4_FLASH)
    assert modes(plan, "window") == [0, 1]
    assert modes(plan, "full") == list(range(2, 43))
    assert all(group.layers == (group.source,) for group in plan.groups)
    assert [group.indexed for group in plan.groups] == [True, False] * 20 + [True]
    assert [layer.contiguous for layer in plan.layers[:5]] == [False, False, False, True, False]
    assert (plan.ratios, plan.contiguous_ratios, plan.pool_ratio) == ((4, 128), (128,), 0)
    csa, hca = plan.groups[:2]
    assert (csa.overlap, csa.span, csa.main_width, csa.index_width) == (True, 8, 1024, 256)
    assert (hca.overlap, hca.span, hca.main_width, hca.index_width) == (False, 128, 512, 0)
    assert (plan.q_norm_eps, plan.rotate, plan.pool_blocks) == (1e-6, True, 0)


def test_v4_pro_counts():
    plan = LayerPlan.from_config(configs.V4_PRO)
    assert sum(group.ratio == 4 for group in plan.groups) == 30
    assert sum(group.ratio == 128 for group in plan.groups) == 31
    assert (plan.heads, plan.index_heads, plan.topk) == (128, 64, 1024)


def test_the_golden_stack():
    plan = LayerPlan.from_config(GOLDEN)
    assert [layer.mode for layer in plan.layers] == [
        "window", "full", "reuse", "full", "reindex", "reuse",
    ]  # fmt: skip
    assert [layer.index_source for layer in plan.layers] == [None, 1, 1, 3, 4, 4]


def test_heads_of_a_shard():
    plan = LayerPlan.from_config(configs.V41_FLASH, heads=8)
    assert (plan.heads, plan.index_heads) == (8, 32)


def test_draft_entries_are_ignored():
    drafts = {**GOLDEN, "compress_ratios": [*GOLDEN["compress_ratios"], 0, 0, 0]}
    assert LayerPlan.from_config(drafts) == LayerPlan.from_config(GOLDEN)


def test_a_stack_of_ratio_1_needs_no_pool():
    fields = {**GOLDEN, "compress_ratios": [1] * 6, "kv_source_layer_ids": [0]}
    fields |= {"index_source_layer_ids": [0, 3], "candidate_source_layer_id": None}
    plan = LayerPlan.from_config(fields)
    assert modes(plan, "reindex") == [3]
    assert not any(layer.builds_pool or layer.reads_pool for layer in plan.layers)
    assert plan.pool_blocks == 0


def test_sources_fall_back_on_the_family_without_a_model_type():
    v4 = {key: value for key, value in configs.V4_FLASH.items() if key != "model_type"}
    assert LayerPlan.from_config(v4) == LayerPlan.from_config(configs.V4_FLASH)
    v41 = {key: value for key, value in GOLDEN.items() if key != "model_type"}
    assert LayerPlan.from_config(v41) == LayerPlan.from_config(GOLDEN)


BAD = {
    "compress_ratios[2] must be one of [0, 1, 2, 128] in a model of family v41, got 3": {
        "compress_ratios": [0, 2, 3, 1, 1, 1]
    },
    "compress_ratios[1] must be one of [0, 1, 2, 128] in a model of family v41, got True": {
        "compress_ratios": [0, True, 2, 1, 1, 1]
    },
    "compress_ratios[3] must be one of [0, 1, 2, 128] in a model of family v41, got 4": {
        "compress_ratios": [0, 2, 2, 4, 4, 4]
    },
    "compress_ratios[2] must be one of [0, 1, 2, 4, 128] in a model of family v4, got 3": {
        "model_type": "deepseek_v4",
        "compress_ratios": [0, 4, 3, 4, 4, 4],
    },
    "compress_ratios must be a list of at least 6 entries, got 2 entries": {
        "compress_ratios": [0, 2]
    },
    "compress_ratios must be a list of at least 6 entries, got 2": {"compress_ratios": 2},
    "num_hidden_layers must be a positive integer, got 0": {"num_hidden_layers": 0},
    "kv_source_layer_ids is missing": {"kv_source_layer_ids": None},
    "kv_source_layer_ids must be layers of ratio > 0, got layer 0 of ratio 0": {
        "kv_source_layer_ids": [0, 1, 3]
    },
    "kv_source_layer_ids must be ascending layer ids below 6, got [3, 1]": {
        "kv_source_layer_ids": [3, 1]
    },
    "kv_source_layer_ids must be ascending layer ids below 6, got [1, 6]": {
        "kv_source_layer_ids": [1, 6]
    },
    "kv_source_layer_ids must be a source of ratio 1 for layer 3, got layer 1": {
        "kv_source_layer_ids": [1],
        "candidate_source_layer_id": None,
    },
    "kv_source_layer_ids must be a source of ratio 2 for layer 1, got none": {
        "kv_source_layer_ids": [2, 3]
    },
    "index_source_layer_ids must be layers of ratio > 0, got layer 0 of ratio 0": {
        "index_source_layer_ids": [0, 1, 3]
    },
    "index_source_layer_ids must be a list with KV source 1, whose index keys layer 1 needs, "
    "got [3, 4]": {"index_source_layer_ids": [3, 4]},
    "candidate_source_layer_id must be a KV source and an index source, got 4": {
        "candidate_source_layer_id": 4
    },
    "candidate_block_size must be 8, got 16": {"candidate_block_size": 16},
    "candidate_topk_blocks is missing": {"candidate_topk_blocks": None},
    "head_dim must be 512, got 576": {"head_dim": 576},
    "index_head_dim must be 128, got 64": {"index_head_dim": 64},
    "num_key_value_heads must be 1, got 8": {"num_key_value_heads": 8},
    "index_topk must be a positive integer, got 0.5": {"index_topk": 0.5},
    "rms_norm_eps must be a positive number, got nan": {"rms_norm_eps": float("nan")},
    "rope_theta must be a positive number, got inf": {"rope_theta": float("inf")},
    f"rope_theta must be a positive number, got {10**400}": {"rope_theta": 10**400},
    "model_type must be a string, got ['deepseek_v4']": {"model_type": ["deepseek_v4"]},
    "rope_scaling must be a mapping, got yarn": {"rope_scaling": "yarn"},
    "rope_scaling.factor is missing": {"rope_scaling": {"rope_type": "yarn"}},
    "rope_scaling.factor must be 16, got 4": {
        "rope_scaling": {**configs.V41_FLASH["rope_scaling"], "factor": 4}
    },
    "compress_rope_theta must be 160000, got 10000": {"compress_rope_theta": 10000},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_field_is_named_in_one_line(message):
    with pytest.raises(ValueError) as error:
        LayerPlan.from_config({**GOLDEN, **BAD[message]})
    assert str(error.value) == f"flash_csa.LayerPlan: {message}"


def test_counts_of_one():
    fields = {"num_attention_heads": 1, "index_n_heads": 1, "index_topk": 1, "sliding_window": 1}
    plan = LayerPlan.from_config({**GOLDEN, **fields})
    assert (plan.heads, plan.index_heads, plan.topk, plan.window) == (1, 1, 1, 1)


def test_bad_heads_and_files(tmp_path):
    with pytest.raises(ValueError, match="heads must be a positive integer, got 0"):
        LayerPlan.from_config(GOLDEN, heads=0)
    broken = tmp_path / "config.json"
    for text in ("{", "[]", "[" * 100_000):
        broken.write_text(text)
        with pytest.raises(ValueError, match=r"config\.json"):
            LayerPlan.from_config(broken)
    with pytest.raises(ValueError, match="config must be one of v41-flash, v4-flash, v4-pro or a"):
        LayerPlan.from_config(tmp_path / "absent.json")
