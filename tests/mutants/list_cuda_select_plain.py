"""Faults of the kernel of select for odd page sizes, long lists and wide pools."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1531,
        "select",
        "a run of equal digits counted again with the next",
        "sm90/select/top_k.cuh",
        "            atomicAdd(&bins[bin], run);\n            run = 0;\n",
        "            atomicAdd(&bins[bin], run);\n",
        "runs are an afterthought to an atomic per key",
        "Top-k bucket overflow",
        "tests/test_select.py::test_crowded_rows_of_absent_pages",
    ),
    Mutant(
        1532,
        "select",
        "an offset that goes on past its page",
        "sm90/select/row_keys.cuh",
        "} else if (++offset == columns.page_size) {",
        "} else if (++offset > columns.page_size) {",
        "pages are whole blocks in the usual case",
        test="tests/test_select.py::test_absent_pages_are_never_selected",
    ),
    Mutant(
        1533,
        "select",
        "scores with the same leading bits taken for ties",
        "sm90/select/top_k.cuh",
        "next_shift == 0 || ties == shared.bins[bin]};",
        "true};",
        "eleven bits tell most scores apart",
        "Top-k bucket overflow",
        "tests/test_select.py::test_crowded_rows_of_absent_pages",
    ),
)
