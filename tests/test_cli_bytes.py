"""The command `bytes`: figures of the specification, backed by tensors really allocated."""

import json

import pytest
import typer
from typer.testing import CliRunner

from flash_csa import configs
from flash_csa.cache import CacheSpec
from flash_csa.cli import bytes as bytes_cli
from flash_csa.plan import LayerPlan

APP = typer.Typer()
APP.command()(bytes_cli.command)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(APP, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def figures(*arguments: str) -> dict:
    return json.loads(run("--json", *arguments))


@pytest.mark.case("Byte accounting")
def test_stated_allocated_and_modelled():
    result = figures()
    assert result["bytes_per_token"] == result["nbytes_per_token"] == 890.0
    assert result["tokens"] == 1_048_576
    assert result["nbytes_total"] == result["model_nbytes_total"] == 933_232_640
    assert result["ideal_nbytes"] == result["allocated_nbytes"] == 933_232_640
    assert (result["window_nbytes"], result["tail_nbytes"]) == (2_703_360, 24_576)
    assert sum(record["share"] for record in result["records"]) == pytest.approx(1)


@pytest.mark.case("Byte accounting")
@pytest.mark.parametrize("page_size", [8, 64, 256])
@pytest.mark.parametrize("context", [4096, 4095, 513])
def test_page_sizes_and_unaligned_contexts(page_size, context):
    result = figures("--page-size", str(page_size), "--context", str(context), "--batch", "2")
    plan = LayerPlan.from_config(configs.V41_FLASH)
    spec = CacheSpec.for_plan(plan, page_size=page_size)
    cache = spec.allocate(plan, max_tokens=context, max_requests=2)
    tensors = [pages.data for group in cache.groups for pages in (group.main, group.index)]
    real = sum(tensor.nbytes for tensor in tensors)
    span = 2 * page_size  # one page of ratio 2, two of ratio 1
    whole = 2 * -(-context // span) * span
    assert result["nbytes_total"] == result["model_nbytes_total"] == real == 890 * whole
    assert result["nbytes_per_token"] == result["bytes_per_token"] == 890.0
    assert result["tokens"] == whole
    ideal = 2 * (3 * (context // 2) + context) * 356
    assert result["ideal_nbytes"] == ideal
    assert result["padding_nbytes"] == real - ideal == result["allocated_nbytes"] - ideal


def test_other_records_and_models(tmp_path):
    assert figures("--main", "WindowFp8", "--context", "64")["bytes_per_token"] == 1490
    assert figures("--main", "MixedFp8", "--index", "IndexFp8")["bytes_per_token"] == 1790
    assert figures("--model", "v4-flash", "--context", "1024")["bytes_per_token"] == 3514.25
    path = tmp_path / "config.json"
    path.write_text(json.dumps(configs.V4_PRO))
    huge = figures("--model", str(path), "--batch", "64")
    assert huge["bytes_per_token"] == 5031.4375
    assert huge["allocated_nbytes"] > huge["ideal_nbytes"] == 64 * 5_275_844_608
    assert huge["tokens"] == 64 * 1024  # one span a request
    assert huge["nbytes_total"] == huge["model_nbytes_total"]


def test_the_table_names_every_part():
    text = run("--context", "1000")
    for part in ("2-7", "20-39", "MainFp4", "IndexFp4", "window", "tails", "selection", "pool"):
        assert part in text
    for value in ("890", "1,490", "1,650", "1,790", "3,200", "10,324", "3,514.25", "48,068"):
        assert value in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--main", "IndexFp4"], "main must be one of"),
        (["--index", "nonsense"], "index must be one of"),
        (["--page-size", "0"], r"page_sizes\[1\] must be 1 to 256, got 0"),
        (["--context", "0"], "--context must be at least 1, got 0"),
        (["--model", "nonsense"], "config must be one of v41-flash, v4-flash, v4-pro or"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    result = CliRunner().invoke(APP, arguments)
    assert isinstance(result.exception, ValueError)
    with pytest.raises(ValueError, match=message):
        raise result.exception
    assert "\n" not in str(result.exception)
