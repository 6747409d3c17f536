"""`plan`: the counts that the specification states, and what the accounting says."""

import json

import pytest
from typer.testing import CliRunner

from flash_csa import CacheSpec, LayerPlan
from flash_csa.accounting import step_costs
from flash_csa.cli.app import app
from models import group_of_eight


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def report(*arguments: str) -> dict:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("ratio", "pool", "context", "expected", "flat"),
    [(1, 4096, 32_768, 40_960, 262_144), (4, 16_384, 1_048_576, 294_912, 2_097_152)],
)
def test_stated_comparisons(ratio, pool, context, expected, flat, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(group_of_eight(ratio, pool // 8)))
    found = report(str(path), "--context", str(context))
    assert (found["comparisons"], found["flat_comparisons"]) == (expected, flat)
    assert found["attended"] == 8 * 512
    shown = invoke(str(path), "--context", str(context)).stdout
    assert f"{expected:,} of {flat:,} flat ({expected / flat:.2%})" in shown


def test_v41_flash_at_a_million_tokens():
    found = report("v41-flash", "--context", "1048576")
    assert found["memory"]["bytes_per_token"] == 890
    assert found["memory"]["cache_nbytes"] == 933_232_640
    assert found["memory"]["window_nbytes"] == 2_703_360
    assert found["memory"]["tail_nbytes"] == 3 * 8192
    layers = found["layers"]
    assert [row["role"] for row in layers[:4]] == ["window", "window", "full", "reuse"]
    assert [row["compared"] for row in layers if row["role"] == "reindex"] == [16_384] * 4
    assert layers[39]["kv_source"] == 20 and layers[39]["index_source"] == 36
    assert layers[20]["pool"] == "builds" and layers[24]["pool"] == "reads"
    assert layers[2]["visible"] == 524_288 and layers[20]["visible"] == 1_048_576
    decode = found["decode"]
    assert decode["main_records"] == 38 * 512 and decode["window_records"] == 40 * 128
    assert decode["index_records"] == found["comparisons"] == 3 * 524_288 + 1_048_576 + 4 * 16_384
    expected = decode["main_records"] * 288 + decode["index_records"] * 68 + 40 * 128 * 528
    assert decode["record_nbytes"] == expected
    assert sum(row["decode_record_nbytes"] for row in layers) == expected


@pytest.mark.parametrize(
    ("model", "per_token"), [("v4-flash", 3514.25), ("v4-pro", 5031.4375), ("v41-flash", 890)]
)
def test_steps_are_those_of_the_accounting(model, per_token):
    found = report(model, "--context", "8192", "--rows", "512")
    assert found["memory"]["bytes_per_token"] == per_token
    plan = LayerPlan.from_config(model)
    spec = CacheSpec.for_plan(plan)
    for name, rows in (("decode", 1), ("prefill", 512)):
        costs = step_costs(plan, spec, [8192 - rows], [rows])
        assert found[name]["nbytes"] == sum(cost.nbytes for cost in costs.values())
        assert found[name]["nbytes"] == sum(row[f"{name}_nbytes"] for row in found["layers"])
        assert found[name]["rows"] == rows


def test_the_model_may_be_an_option():
    assert report("--model", "v4-pro") == report("v4-pro")


def test_neighbours_share_a_line():
    shown = invoke("v41-flash", "--context", "65536").stdout
    assert "37-39" in shown and "0-1" in shown and "reindex" in shown
    assert "…" not in shown


@pytest.mark.parametrize("arguments", [("v5",), ("v41-flash", "--context", "0"), ()])
def test_bad_input_is_one_line(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
