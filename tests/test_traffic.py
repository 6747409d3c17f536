"""Traffic: the model against accounting and by hand, ncu's output, measured calls on the CPU."""

import json

import pytest
import typer
from typer.testing import CliRunner

from flash_csa import CacheSpec, LayerPlan, accounting
from flash_csa.cli import traffic as traffic_cli
from flash_csa.traffic import ncu, plot
from flash_csa.traffic.kernels import Calls
from flash_csa.traffic.model import KINDS, Shape, report

V41 = LayerPlan.from_config("v41-flash")
SPEC = CacheSpec.for_plan(V41)
APP = typer.Typer()
APP.command()(traffic_cli.command)
METRICS = list(ncu.METRICS.values())


def run(*arguments: str) -> str:
    result = CliRunner().invoke(APP, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("record", "run_length", "nbytes"),
    [
        ("MainFp4", 1, 288),
        ("WindowFp8", 1, 544),  # 528 bytes lie across 17 sectors
        ("WindowFp8", 64, 528),
        ("IndexFp4", 64, 68),
        ("IndexFp4", 8, 68),  # a block of the pool
        ("IndexFp4", 1, 64 + 32),
        ("MixedFp8", 1, 576 + 32),
    ],
)
def test_sectors(record, run_length, nbytes):
    assert accounting.sector_bytes(record, 64, run_length) == nbytes


def test_the_model_is_that_of_accounting():
    shape = Shape(context=100_000, batch=3, rows=2)
    result = report(V41, SPEC, shape)
    costs = accounting.step_costs(V41, SPEC, [99_998] * 3, [2] * 3)
    assert result["nbytes"] == sum(cost.nbytes for cost in costs.values())
    assert result["nbytes"] == sum(result["kinds"].values())
    assert set(result["kinds"]) <= set(KINDS)
    assert result["stages"]["attend"]["bytes"] == costs["attend"].bytes
    json.dumps(result)


def test_a_decode_step_by_hand():
    result = report(V41, SPEC, Shape(context=131_072))
    assert result["kinds"]["main codes"] == 38 * 512 * 256 + 4 * 256
    assert result["kinds"]["window"] == 40 * 129 * 528
    assert result["unique_pages"]["window"] == 40 * 2
    assert result["unique_pages"]["index"] < 3 * 1024 + 2048 + 4 * 2048
    assert result["gather_nbytes"]["records"] == 2 * 1024 * (38 * 512 + 40 * 128)
    scored = 3 * 65_536 + 131_072 + 4 * 16_384
    assert result["gather_nbytes"]["scores"] == 2 * 4 * scored
    assert result["page_waste_nbytes"] == 0
    assert report(V41, SPEC, Shape(context=131_071))["page_waste_nbytes"] > 0


def test_a_chunk_touches_the_window_before_it_and_itself():
    pages = report(V41, SPEC, Shape(context=4096, rows=512))["unique_pages"]
    assert pages["window"] == 40 * 10  # tokens 3457 to 4095, pages 54 to 63


def test_layers_that_read_everything_waste_no_sectors():
    """V4: a selected record brings a sector for its 8 bytes of scales; whole pages do not."""
    plan = LayerPlan.from_config("v4-flash")
    result = report(plan, CacheSpec.for_plan(plan), Shape(context=131_072))
    assert result["sector_waste_nbytes"]["main"] == 21 * 512 * 24
    contiguous, selected = 1024 // 8, accounting.expected_unique(512, 32_768 // 64)
    assert result["unique_pages"]["main"] == 20 * contiguous + 21 * selected


def test_a_pool_of_a_short_context_is_read_once():
    costs = accounting.step_costs(V41, SPEC, [100], [200])
    assert costs["reindex"].bytes["index keys"] == 4 * 300 * 68


def _csv(*rows: tuple[str, list[str]]) -> str:
    header = ["ID", "Kernel Name", *METRICS]
    lines = ["==PROF== Connected", header, ["", "", "byte", "byte", "sector", "%", "ns"]]
    lines += [[str(i), name, *values] for i, (name, values) in enumerate(rows)]
    return "\n".join(
        line if isinstance(line, str) else ",".join(f'"{cell}"' for cell in line) for line in lines
    )


def test_counters_are_grouped_by_mark():
    mark = ("probe_kernel(int *)", ["9", "9", "9", "9", "9"])
    first = ("tails_kernel", ["1,024", "32", "40", "50", "1000"])
    second = ("entries_kernel", ["1000", "0", "120", "10", "3000.5"])
    items = ncu.parse(_csv(("before", ["1"] * 5), mark, first, second, mark, second))
    assert [item.launches for item in items] == [2, 1]
    assert (items[0].read_nbytes, items[0].written_nbytes, items[0].nbytes) == (2024, 32, 2056)
    assert items[0].sectors == 160 and items[0].hit_rate == pytest.approx(0.2)
    assert items[0].time_us == pytest.approx(4.0005)


def test_counters_of_two_runs_are_put_together():
    logs = []
    for group, values in ((ncu.DRAM, ["7", "5"]), (ncu.L2, ["30", "10", "2000"])):
        rows = [["0", "probe_kernel(int *)", *values], ["1", "store_kernel", *values]]
        lines = [["ID", "Kernel Name", *group.values()], *rows]
        logs.append("\n".join(",".join(f'"{cell}"' for cell in line) for line in lines))
    assert ncu.parse(*logs) == [ncu.Counted(1, 7, 5, 30, 0.1, 2.0)]
    assert ncu.parse(logs[0]) == [ncu.Counted(1, 7, 5, 0, 0.0, 0.0)]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("v41-flash", Shape(context=1000, batch=2)),
        ("v41-flash", Shape(context=300, rows=64)),
        ("v4-flash", Shape(context=600)),
    ],
)
def test_every_measured_call_runs(model, shape):
    plan = LayerPlan.from_config(model)
    names = []
    for kernel in Calls(plan, CacheSpec.for_plan(plan), shape, "cpu").kernels():
        kernel.call()
        assert kernel.cost.nbytes > 0
        names.append(kernel.name)
    assert len(set(names)) == len(names)
    stages = {name.split(",")[0].split(" ")[0] for name in names}
    assert {"rope_store", "compress", "index_select", "index_scores", "select", "attend"} <= stages
    assert ("reindex" in stages) == (model == "v41-flash")


def test_the_command_prints_the_model_and_says_why_nothing_is_measured(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = run("--measure", "--context", "4096")
    assert "not measured: there is no GPU here" in text
    for part in ("main codes", "index keys", "unique pages", "sector waste", "gather-based"):
        assert part in text
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(ncu, "find", lambda: None)
    result = json.loads(run("--measure", "--json", "--context", "4096"))
    assert result["not_measured"] == "there is no ncu here"


def test_measured_beside_the_model(monkeypatch):
    counted = ncu.Counted(1, 3000, 96, 100, 0.25, 5.0)
    printed = [{"kernel": "store", "bytes": {"inputs": 2000, "outputs": 1000}, "records": 50}]
    printed[0]["scratch"] = 2160
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(ncu, "profile", lambda arguments: ([counted], json.dumps(printed)))
    (kernel,) = json.loads(run("--measure", "--json"))["kernels"]
    assert kernel["ratio"] == pytest.approx(1.032)
    assert kernel["ratio_with_scratch"] == pytest.approx(0.6)
    assert kernel["sectors_per_record"] == 2
    assert "1.03" in run("--measure")


def test_formats_of_the_figure(tmp_path):
    sizes = plot.formats().values()
    assert [accounting.bytes_per_token(V41, *size) for size in sizes] == [890, 1650, 1790, 3200]
    pytest.importorskip("matplotlib")
    row = {"stage": "attend", "flops": 1e9, "bytes": 1e7, "tflops": 100.0, "device": "H200"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    figure = tmp_path / "figure.png"
    run("--plot", str(figure), "--results", str(tmp_path / "rows.jsonl"))
    assert figure.stat().st_size > 10_000


def test_a_format_that_no_figure_has_is_refused_before_anything_is_printed(tmp_path):
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(APP, ["--plot", str(tmp_path / "x.foo")])
    assert result.stdout == "" and not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"--plot must be a file of one of .* png, .*x\.foo$"):
        raise result.exception


def test_unusable_files_are_one_line(tmp_path):
    pytest.importorskip("matplotlib")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"stage": "attend"}\n')
    figure = ["--plot", str(tmp_path / "figure.png")]
    for arguments, message in (
        ([*figure, "--results", str(rows)], "rows.jsonl, line 1: no row of the benchmark"),
        ([*figure, "--results", str(tmp_path / "none")], "--results: .*No such file"),
        (["--plot", str(tmp_path / "none" / "figure.png")], "--plot: .*No such file"),
    ):
        result = CliRunner().invoke(APP, arguments)
        with pytest.raises(ValueError, match=message):
            raise result.exception


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "rows must be 1 to 131072"),
        (["--rows", "9", "--context", "8"], "rows must be 1 to 8"),
        (["--batch", "0"], "batch must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    result = CliRunner().invoke(APP, arguments)
    with pytest.raises(ValueError, match=message):
        raise result.exception
