"""README is true: its tables come from the code, its example runs, its commands exist."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import flash_csa as csa
from flash_csa import validate

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench import cases, results  # noqa: E402

README = (ROOT / "README.md").read_text()


def test_tables_are_rendered_from_the_code():
    render = runpy.run_path(str(ROOT / "docs" / "render.py"))
    for path in render["BLOCKS"]:
        assert render["render"](path) == path.read_text(), "run: python docs/render.py"


EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)


def run_example(*changes: tuple[str, str]) -> dict:
    """The variables of the example after its run, with each (old, new) changed in its one place."""
    text, names = EXAMPLES[0], {}
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    torch.manual_seed(0)
    exec(compile(text, "README.md", "exec"), names)
    return names


def test_example_runs(capsys):
    assert len(EXAMPLES) == 1
    run_example()
    assert capsys.readouterr().out == (
        "torch.Size([501, 8, 512]) the last row reads 250 of 250\n"
        "torch.Size([499, 8, 512]) the last row reads 256 of 500\n"
    )
    code = [line for line in EXAMPLES[0].splitlines() if line.strip()]
    assert len(code) <= 30


def test_the_examples_tail_carries_what_it_says():
    """Any cut gives the bytes of one call; without the tail the straddling entry is not stored."""
    no_tail = (" tail=tail,", "")
    one_call = (
        ("1000, 501", "1000, 1000"),
        ("arange(10,", "arange(18,"),
        ("empty(10,", "empty(18,"),
    )
    cut, whole, bare = run_example(), run_example(*one_call), run_example(no_tail)
    for pages in ("main", "index"):
        assert torch.equal(cut[pages].data, whole[pages].data)
    records = [names["main"].data.view(512, -1) for names in (bare, whole)]
    assert (records[0] != records[1]).any(1).nonzero().tolist() == [[250]]
    slot = torch.tensor([250], dtype=torch.int32)
    loaded = [csa.load(names[p], slot) for names in (bare, whole) for p in ("main", "index")]
    assert [bool(values.any()) for values in loaded] == [False, False, True, True]
    with (
        validate.validation(),
        pytest.raises(ValueError, match=r"compress: tail\.rows must be given"),
    ):
        run_example(no_tail)


def test_the_rule_of_the_graphs_calls_is_the_benchs():
    text = " ".join(README.split())
    limits = f"{cases.WORKING_SET // 10**6} MB (four times the L2) or are {cases.MAX_INSTANCES}"
    assert (
        f"A graph has {cases.INSTANCES} calls; more of small ones, until they touch {limits};"
        in text
    )
    rows = results.load(ROOT / "bench" / "results" / "h200.jsonl").values()
    calls = {row["instances"] for row in rows if row["stage"]}
    assert min(calls) >= 2 and max(calls) <= cases.MAX_INSTANCES and "fewer, 2 at least," in text


def test_a_missed_bar_is_shown():
    render = runpy.run_path(str(ROOT / "docs" / "render.py"))
    case = next(case for case in cases.CASES.values() if case.must == 2.0)
    for ratio, shown in ((1.99, "2, missed"), (2.0, "2"), (None, "2")):
        assert render["bar"]({"case": case.name, "ratio": ratio}) == shown
    assert render["bar"]({"case": "ceiling.copy", "ratio": None}) == ""


def test_a_faster_way_to_call_the_peer_is_shown(monkeypatch):
    """In a column of its own, which tables without such a row lack."""
    render = runpy.run_path(str(ROOT / "docs" / "render.py"))
    name, none = "attend.decode.h8.b64", {"best_peer": None, "best_peer_us": None}
    best = {"best_peer": "FlashMLA, 128 heads", "best_peer_us": 1038.42, "best_ratio": 2.144}
    rows = {key: row | none for key, row in results.load(render["H200"]).items()}
    monkeypatch.setattr(results, "load", lambda path: rows)
    for make in (render["bench_table"], lambda: render["rows_table"](["attend.decode.*"])):
        rows[name] |= none
        plain = make().split("\n\n")[0].splitlines()
        rows[name] |= best
        added = {}
        for was, line in zip(plain, make().splitlines(), strict=False):
            *cells, cell, ceiling = line.split(" | ")
            assert " | ".join([*cells, ceiling]) == was
            added.setdefault(cell, []).append(cells[0])
        assert added.pop("peer padded further, us / ratio") == ["| case"]
        assert added.pop("---") == ["| ---"]
        (way,) = added.pop("128 heads: 1,038.4 / 2.14")
        assert way.startswith(f"| `{name}`") and list(added) == [""]


@pytest.mark.parametrize("target", re.findall(r"^make (\w+) ", README, re.M))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def test_linked_files_exist():
    for path in re.findall(r"`((?:docs|tests|bench)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=str
)
def test_links_lead_somewhere(path):
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text()):
        linked = path.parent / target if target else path
        assert linked.exists(), target
        assert not heading or heading in anchors(linked), f"{target}#{heading}"


def anchors(path: Path) -> list[str]:
    """What links call the headings of a document."""
    headings = re.findall(r"^#+ (.+)", path.read_text(), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("stage", ["compress"])
def test_a_deep_dive_links_its_kernels(stage):
    """Every kernel file of the stage's folder that the deep dive names is a link."""
    text = (ROOT / "docs" / f"{stage}.md").read_text()
    folder = f"csrc/sm90/{stage}"
    for source in (ROOT / folder).glob("*.cu"):
        assert f"](../{folder}/{source.name})" in text, source.name
